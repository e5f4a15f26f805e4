"""The `syncer` command as a person meets it: help, wrong words, exit statuses."""

import subprocess
import sys
from pathlib import Path

import pytest

from syncer import __version__
from syncer.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]


def syncer(*argv, module="syncer"):
    return subprocess.run([sys.executable, "-m", module, *argv], capture_output=True, text=True,
                          timeout=60, check=False)


def test_help_lists_every_command():
    done = syncer("--help")
    assert done.returncode == 0
    assert all(f"    {name}" in done.stdout for name in COMMANDS)
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_version():
    assert syncer("--version").stdout == f"syncer {__version__}\n"
    verbose = syncer("--version", "-v").stdout.splitlines()
    assert verbose[0] == f"syncer {__version__}"
    assert [line.split()[0] for line in verbose[1:]] == [
        "sha256", "codec", "blend", "reduce", "cpu", "compiler", "openmp"]


@pytest.mark.parametrize("argv", [
    [], ["sreve"], ["--frob"], ["serve"], ["serve", "--learnres", "2"],
    ["serve", "--learners", "2", "--total-steps", "0"], ["demo", "--learners", "many"],
])
def test_a_wrong_command_line_is_one_sentence_and_status_2(argv):
    done = syncer(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("syncer: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help_that_fits_80_columns(command):
    done = syncer(command, "--help")
    assert done.returncode == 0, done.stderr
    assert f"syncer {command}" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_server_module_takes_the_same_flags():
    done = syncer("--learners", "0", "--total-steps", "1", module="syncer.server")
    assert done.returncode == 2
    assert done.stderr == (
        "syncer: --learners 0 cannot be used: give a whole number between 1 and 4294967295\n")


@pytest.mark.parametrize("words", [
    "--help", "--version", "serve --help", "serve --learners 0 --total-steps 1", "demo --help"])
def test_what_only_answers_loads_neither_numpy_nor_compiled_modules(words):
    code = ("import sys; from syncer.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "except SystemExit: pass\n"
            "print(*(m.__name__ for m in list(sys.modules.values()) if m.__name__ == 'numpy' or "
            "m.__name__.startswith('syncer.') and m.__file__.endswith('.so')), sep='\\n')")
    done = subprocess.run([sys.executable, "-c", code, *words.split()], capture_output=True,
                          text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1:] in ([], [""]), done.stdout


@pytest.mark.parametrize("words", [
    "serve --learners 1 --total-steps 1 --checkpoint-path c", "checkpoint inspect c",
    "checkpoint export c d", "pull 127.0.0.1:1 -o c"])
def test_in_a_directory_that_was_removed_one_sentence(tmp_path, words):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$1"; shift; exec "$@"', "sh", gone, sys.executable, "-c",
         f"import sys; sys.path.insert(0, {str(ROOT)!r}); from syncer.cli import main; "
         "sys.exit(main())", *words.split()],
        capture_output=True, text=True, cwd=gone, timeout=60, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
