"""The type stubs say what the module is: checked by mypy against the installed package."""

import subprocess
import sys

import pytest

pytest.importorskip("mypy.stubtest", reason="mypy is not installed")

CONFIG = """
[mypy]
# What is compared is the stub of the native module with the module; the package's own modules carry
# their types in their source.
follow_imports = silent
ignore_missing_imports = True
"""

#: The binding lists every name it exports; a stub's own would only repeat the stub.
ALLOWED = "drivetrain._native.__all__"


def test_native_stub_matches_the_module(tmp_path):
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    allowed = tmp_path / "allowed"
    allowed.write_text(ALLOWED)
    command = [sys.executable, "-m", "mypy.stubtest", "drivetrain._native"]
    options = ["--mypy-config-file", str(config), "--concise", "--allowlist", str(allowed)]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, cwd=tmp_path, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_public_names_exist_and_are_documented():
    import drivetrain as dt

    for name in dt.__all__:
        value = getattr(dt, name)
        assert name == "__version__" or (value.__doc__ or "").strip(), name
