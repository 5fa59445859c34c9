#!/usr/bin/env bash
# Creates .venv with torch, the test tools and the release wheel of this tree. Does nothing twice:
# each step keeps a stamp that names what it was made from. Never calls sudo.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
stamps=$venv/.stamps
python=${PYTHON:-python3}

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }

have_stamp() { [ -f "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$2" ]; }
put_stamp() { mkdir -p "$stamps" && printf '%s' "$2" >"$stamps/$1"; }

make_venv() {
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "Python 3.11 or newer is needed; set PYTHON to one" >&2
        exit 2
    }
    [ -x $venv/bin/python ] || "$python" -m venv $venv
    [ -x $venv/bin/uv ] || $venv/bin/python -m pip install --quiet --disable-pip-version-check uv
}

has_nvidia_driver() { /sbin/ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; }

install_python_packages() {
    local mode=cpu
    has_nvidia_driver && mode=cuda
    local want
    want="$mode $(cat scripts/requirements*.txt scripts/no-cuda.txt scripts/cuda_stubs.py |
        sha256sum)"
    have_stamp packages "$want" && return
    say "installing torch and test tools ($mode)"
    if [ $mode = cuda ]; then
        $venv/bin/uv pip install --quiet --python $venv/bin/python -r scripts/requirements.txt
    else
        $venv/bin/uv pip install --quiet --python $venv/bin/python --override scripts/no-cuda.txt \
            -r scripts/requirements.txt -r scripts/requirements-no-cuda.txt
        $venv/bin/python scripts/cuda_stubs.py
        $venv/bin/python -c 'import torch' || {
            say "stand-ins did not do; installing the full CUDA build"
            $venv/bin/uv pip install --quiet --python $venv/bin/python --reinstall \
                -r scripts/requirements.txt
        }
    fi
    put_stamp packages "$want"
}

jpeg_features() {
    if command -v nasm >/dev/null && command -v cc >/dev/null; then
        echo turbojpeg
    fi
}

# What the wheel is made from; without git, so that an unpacked archive will do.
sources() {
    find Cargo.toml Cargo.lock src formats gpu-decode python -type f \
        -not -path 'python/tests/*' -not -path '*/__pycache__/*' -not -name '*.so'
}

build_wheel() {
    local features want
    features=$(jpeg_features)
    want="$features $(sources | LC_ALL=C sort |
        while read -r f; do sha256sum "$f"; done | sha256sum)"
    have_stamp wheel "$want" && return
    if [ -n "$features" ]; then
        say "building the release wheel with libjpeg-turbo (some minutes the first time)"
    else
        say "building the release wheel with zune-jpeg alone;" \
            "for libjpeg-turbo: apt-get install nasm"
    fi
    rm -rf target/wheels
    PATH="$PWD/$venv/bin:$PATH" $venv/bin/maturin build --quiet --release \
        --manifest-path python/Cargo.toml \
        --interpreter $venv/bin/python --out target/wheels ${features:+--features $features}
    $venv/bin/uv pip install --quiet --python $venv/bin/python --force-reinstall --no-deps \
        target/wheels/drivetrain-*.whl
    put_stamp wheel "$want"
}

make_venv
install_python_packages
build_wheel
