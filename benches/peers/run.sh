#!/usr/bin/env bash
# Runs the peer benchmarks: run.sh [images] [lidar] [checkpoint] [checkpoint2] [many] [compression];
# ROUNDS, WORK and SECONDS_PER_RUN adjust it.
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts/setup.sh
here=benches/peers
venv=$here/.venv
if [ ! -f $venv/.ready ]; then
    .venv/bin/uv venv --quiet --python .venv/bin/python $venv
    overrides=()
    extra=()
    if ! /sbin/ldconfig -p | grep -q 'libcuda\.so\.1'; then
        overrides=(--override scripts/no-cuda.txt)
        extra=(-r scripts/requirements-no-cuda.txt)
    fi
    .venv/bin/uv pip install --quiet --python $venv/bin/python "${overrides[@]}" \
        -r scripts/requirements.txt "${extra[@]}" -r $here/requirements.txt
    [ ${#overrides[@]} = 0 ] || $venv/bin/python scripts/cuda_stubs.py
    touch $venv/.ready
fi
.venv/bin/uv pip install --quiet --python $venv/bin/python --force-reinstall --no-deps \
    target/wheels/drivetrain-*.whl
work=${WORK:-target/peers}
mkdir -p "$work" $here/results
case "${*:-compression}" in *compression*) cargo bench --quiet --bench codec --no-run ;; esac
for workload in "${@:-images lidar checkpoint checkpoint2 many compression}"; do
    for name in $workload; do
        $venv/bin/python $here/harness.py "$name" --work "$work" --rounds "${ROUNDS:-9}" \
            --seconds "${SECONDS_PER_RUN:-5}" --out "$here/results/$name.jsonl"
        $venv/bin/python $here/report.py "$here/results/$name.jsonl" | tee "$here/results/$name.md"
    done
done
