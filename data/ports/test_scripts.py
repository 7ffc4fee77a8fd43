"""Without their packages the scripts of this folder still help, and say what is missing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
WITHOUT_PACKAGES = """
import runpy, sys
sys.modules |= dict.fromkeys(["torch", "trl", "ray"])
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("script", ["trl_lopti.py", "check_verl.py"])
def test_help_and_missing_packages(script):
    def run(*flags):
        command = [sys.executable, "-c", WITHOUT_PACKAGES, HERE / script, *flags]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    described = ast.get_docstring(ast.parse((HERE / script).read_text(encoding="utf-8")))
    helped, missing = run("--help"), run()
    assert helped.returncode == 0 and described.split("\n")[0] in helped.stdout
    assert missing.returncode == 2 and "Traceback" not in missing.stderr
    assert "torch" in missing.stderr.splitlines()[-1]
