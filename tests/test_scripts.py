"""Set-up and packaging: the scripts, run with stand-ins for Python, and the wheel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
TOOLS = ["bash", "cat", "cp", "find", "flock", "mkdir", "readlink", "rm", "sha256sum"]
BASH = shutil.which("bash") or "bash"

# Answers as Python 3.9 does, whatever the tests run on.
OLD_PYTHON = f"""#!{BASH}
exec '{sys.executable}' -c 'import sys; sys.version_info = (3, 9, 18); exec(sys.argv[1])' "$2"
"""

# Logs every call that is more than a question about the version. As `-m venv FOLDER` it copies itself there.
# A call whose words contain $FAIL fails.
FAKE_PYTHON = f"""#!{BASH}
[[ $1 == -c && $2 == *version_info* ]] && exit 0
echo "$PWD|$*" >>"$LOG"
[[ -n ${{FAIL:-}} && "$*" == *"$FAIL"* ]] && exit 1
[[ $1 == -c ]] && echo "$0"
[[ $1$2 == -mvenv ]] && mkdir "${{!#}}/bin" && cp "$0" "${{!#}}/bin/python"
exit 0
"""


def write_executable(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@dataclass(frozen=True)
class Checkout:
    """A copy of what set-up needs, and a PATH that holds nothing else."""

    root: Path
    bin: Path
    log: Path

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def start(
        self, script: str, *args: str, cwd: Path | None = None, stderr: int = subprocess.PIPE, **env: str
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [BASH, str(self.root / script), *args],
            cwd=cwd or self.root,
            env={"PATH": str(self.bin), "LOG": str(self.log), **env},
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )

    def run(self, script: str, *args: str, cwd: Path | None = None, **env: str) -> tuple[int, str]:
        """Exit code and standard error."""
        process = self.start(script, *args, cwd=cwd, stderr=subprocess.PIPE, **env)
        _, err = process.communicate(timeout=20)
        return process.returncode, err

    def calls(self) -> list[str]:
        """What Python was called with since the last time this was asked."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line.partition("|")[2] for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "a [folder] of mine", tmp_path / "bin", tmp_path / "calls")
    shutil.copytree(ROOT / "scripts", made.root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, made.root)
    made.bin.mkdir()
    for tool in TOOLS:
        (made.bin / tool).symlink_to(shutil.which(tool) or tool)
    return made


@pytest.fixture
def with_python(checkout: Checkout) -> Checkout:
    write_executable(checkout.bin / "python3", FAKE_PYTHON)
    return checkout


STEPS = [("1/4", "making the"), ("2/4", "installing pip"), ("3/4", "installing torch"), ("4/4", "installing the")]


def num_pip_installs(calls: list[str]) -> int:
    return sum("--editable" in call for call in calls)


@pytest.mark.parametrize("pythons", [[], ["python3", "python"]], ids=["none", "old"])
def test_no_python_is_one_sentence_and_leaves_nothing(checkout: Checkout, pythons: list[str]) -> None:
    for name in pythons:
        write_executable(checkout.bin / name, OLD_PYTHON)
    code, err = checkout.run("scripts/train")
    assert code == 3
    assert err.count("\n") == 1
    assert "Python >= 3.11" in err
    assert "LOWVRAM_PYTHON=" in err
    assert not checkout.venv.exists()


def test_a_python_that_is_found_but_does_not_run_is_passed_over(with_python: Checkout) -> None:
    write_executable(with_python.bin / "python3.13", f"#!{BASH}\nexit 127\n")
    assert with_python.run("scripts/train")[0] == 0


def test_lowvram_python_is_used_as_it_is(checkout: Checkout, tmp_path: Path) -> None:
    python = write_executable(tmp_path / "mine", FAKE_PYTHON)
    link = tmp_path / "bin" / "train"
    link.symlink_to(checkout.root / "scripts" / "train")
    assert checkout.run(str(link), "data.path=a b", cwd=tmp_path, LOWVRAM_PYTHON=str(python)) == (0, "")
    assert checkout.log.read_text() == f"{tmp_path}|{checkout.root}/train.py data.path=a b\n"
    assert not checkout.venv.exists()


@pytest.mark.parametrize("wrong", ["/nowhere/python", "/", "old"])
def test_a_wrong_lowvram_python_is_one_sentence(checkout: Checkout, wrong: str) -> None:
    write_executable(checkout.bin / "old", OLD_PYTHON)
    code, err = checkout.run("scripts/train", LOWVRAM_PYTHON=wrong)
    assert code == 3
    assert err.count("\n") == 1
    assert err.startswith(f"LOWVRAM_PYTHON='{wrong}'")


def test_set_up_once_and_again_only_when_the_requirements_change(with_python: Checkout) -> None:
    code, err = with_python.run("scripts/train", "seed=1")
    calls = with_python.calls()
    assert code == 0
    assert "setting up" in err
    assert re.findall(r"^  (\d/4) (\w+ \w+)", err, re.MULTILINE) == STEPS
    assert re.search(r"^  ready after \d+:\d\d minutes$", err, re.MULTILINE)
    assert calls[0].startswith("-m venv")
    assert num_pip_installs(calls) == 1
    assert calls[-1] == f"{with_python.root}/train.py seed=1"

    assert with_python.run("scripts/train") == (0, "")
    assert with_python.calls() == [f"{with_python.root}/train.py"]

    with (with_python.root / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    code, err = with_python.run("scripts/train")
    calls = with_python.calls()
    assert code == 0
    assert "updating" in err
    assert re.findall(r"^  (\d/4)", err, re.MULTILINE) == [number for number, _ in STEPS]
    assert num_pip_installs(calls) == 1
    assert not any("venv" in call.split() for call in calls)


def test_a_failure_names_the_step(with_python: Checkout) -> None:
    code, err = with_python.run("scripts/train", FAIL="constraints.txt --quiet torch")
    assert code == 1
    *_, last, failed = err.splitlines()
    assert last.startswith("  3/4 installing torch")
    assert failed.startswith(f"setting up {with_python.venv} failed")


def all_of(terminal: int) -> str:
    """What was written to a terminal that nobody writes to any more. A read gives a part of it."""
    said = b""
    with suppress(OSError):  # EIO: the end
        while more := os.read(terminal, 2**16):
            said += more
    return said.decode()


def test_pip_shows_how_far_the_large_download_is_on_a_terminal(with_python: Checkout) -> None:
    """And only there: what is logged has a line for each step."""
    terminal, stderr = os.openpty()
    process = with_python.start("scripts/train", stderr=stderr)
    process.communicate(timeout=20)
    os.close(stderr)
    assert "3/4 installing torch" in all_of(terminal)
    os.close(terminal)
    shown = [call for call in with_python.calls() if "install" in call and "--quiet" not in call]
    assert [call.split()[-1] for call in shown] == ["torch"]


def test_a_moved_checkout_is_installed_anew(with_python: Checkout) -> None:
    with_python.run("scripts/train")
    with_python.calls()
    moved = Checkout(with_python.root.with_name("moved"), with_python.bin, with_python.log)
    with_python.root.rename(moved.root)
    assert moved.run("scripts/train")[0] == 0
    assert num_pip_installs(moved.calls()) == 1


def test_an_unfinished_environment_is_made_anew(with_python: Checkout) -> None:
    code, err = with_python.run("scripts/train", FAIL="--editable")
    assert code == 1
    assert "failed" in err
    left_over = with_python.venv / "half"
    left_over.touch()
    with_python.calls()
    assert with_python.run("scripts/train")[0] == 0
    assert with_python.calls()[0].startswith("-m venv")
    assert not left_over.exists()


def test_a_failed_update_keeps_the_environment_and_is_tried_again(with_python: Checkout) -> None:
    with_python.run("scripts/train")
    (with_python.root / "constraints.txt").write_text("")
    kept = with_python.venv / "kept"
    kept.touch()
    assert with_python.run("scripts/train", FAIL="--editable")[0] == 1
    with_python.calls()
    assert with_python.run("scripts/train")[0] == 0
    assert num_pip_installs(with_python.calls()) == 1
    assert kept.exists()


def test_an_environment_that_the_user_made_is_filled_not_emptied(with_python: Checkout) -> None:
    (with_python.venv / "bin").mkdir(parents=True)
    write_executable(with_python.venv / "bin" / "python", FAKE_PYTHON)
    kept = with_python.venv / "kept"
    kept.touch()
    assert with_python.run("scripts/train")[0] == 0
    assert num_pip_installs(with_python.calls()) == 1
    assert kept.exists()


def test_two_at_once_set_up_one_environment(with_python: Checkout) -> None:
    processes = [with_python.start("scripts/train", f"seed={seed}") for seed in range(2)]
    for process in processes:
        process.communicate(timeout=20)
    calls = with_python.calls()
    assert [process.returncode for process in processes] == [0, 0]
    assert num_pip_installs(calls) == 1
    assert sum("train.py" in call for call in calls) == 2


STAGES = ["-m ruff format --check", "-m ruff check", "-m basedpyright", "-m pytest"]  # the last two at a time


@pytest.mark.parametrize("num_run", range(1, 5))
def test_checks_fail_if_one_of_them_does(checkout: Checkout, tmp_path: Path, num_run: int) -> None:
    """Nothing begins after a mistake in format or lint. Types, which run beside the tests, end when these fail."""
    python = write_executable(tmp_path / "mine", FAKE_PYTHON)
    code, _ = checkout.run("scripts/test", LOWVRAM_PYTHON=str(python), FAIL=STAGES[num_run - 1])
    calls = [call for call in checkout.calls() if call.startswith("-m")]
    assert code == 1
    counts = [sum(call.startswith(stage) for call in calls) for stage in STAGES]
    assert counts in {1: [[1, 0, 0, 0]], 2: [[1, 1, 0, 0]], 3: [[1, 1, 1, 1]], 4: [[1, 1, 1, 1], [1, 1, 0, 1]]}[num_run]
    assert len(calls) == sum(counts)


@pytest.mark.parametrize("num_run", range(1, 4))
def test_the_checks_without_tests_stop_at_the_first_that_fails(
    checkout: Checkout, tmp_path: Path, num_run: int
) -> None:
    python = write_executable(tmp_path / "mine", FAKE_PYTHON)
    code, _ = checkout.run("scripts/test", "lint", LOWVRAM_PYTHON=str(python), FAIL=STAGES[num_run - 1])
    assert code == 1
    assert len([call for call in checkout.calls() if call.startswith("-m")]) == num_run
    code, _ = checkout.run("scripts/test", "lint", LOWVRAM_PYTHON=str(python))
    assert code == 0
    assert not any(call.startswith("-m pytest") for call in checkout.calls())


def test_checks_with_arguments_run_pytest_alone(checkout: Checkout, tmp_path: Path) -> None:
    python = write_executable(tmp_path / "mine", FAKE_PYTHON)
    code, _ = checkout.run("scripts/test", "-k", "ledger", cwd=tmp_path, LOWVRAM_PYTHON=str(python))
    assert code == 0
    assert checkout.log.read_text().splitlines()[-1] == f"{checkout.root}|-m pytest -k ledger"


@pytest.mark.parametrize(("tier", "chosen"), [("fast", "not slow and not medium"), ("all", ""), ("", "not slow")])
def test_each_tier_holds_the_one_before(checkout: Checkout, tmp_path: Path, tier: str, chosen: str) -> None:
    python = write_executable(tmp_path / "mine", FAKE_PYTHON)
    write_executable(checkout.root / "scripts" / "emulated_gpu", "echo emulated >>calls_of_emulated_gpu\n")
    code, _ = checkout.run("scripts/test", *tier.split(), LOWVRAM_PYTHON=str(python))
    assert code == 0
    (tests,) = [call for call in checkout.calls() if call.startswith("-m pytest")]
    assert tests.endswith(f"-m {chosen}")
    assert (checkout.root / "calls_of_emulated_gpu").exists() == (tier == "all")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in pairs}


def test_every_requirement_is_pinned_within_its_range() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins()
    extras = project["optional-dependencies"]
    for text in [
        *project["dependencies"],
        *extras["hf"],
        *extras["report"],
        *extras["workspace"],
        *extras["tensorboard"],
        *extras["launchers"],
        *extras["onnx"],
        *extras["optuna"],
        *extras["tensorboard"],
        *extras["dev"],
    ]:
        requirement = Requirement(text)
        if requirement.name == project["name"]:
            assert requirement.extras == {"hf", "launchers", "onnx", "optuna", "report", "tensorboard", "workspace"}
            continue
        assert requirement.specifier.contains(pinned[requirement.name]), text


def test_torch_is_pinned_without_a_build() -> None:
    assert pins()["torch"] == "2.13.0"
    assert "+" not in "".join(pins().values())


def test_scripts_can_be_executed() -> None:
    for name in ("scripts/python", "scripts/train", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("packages")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True)
    return folder


def yaml_names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.yaml")} - {"local/default.yaml"}


def test_wheel_ships_the_whole_configuration(packages: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(packages.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    assert (tmp_path / "lowvram" / "conf" / "config.yaml").exists()
    assert (tmp_path / "lowvram" / "conf" / "__init__.py").exists()
    assert yaml_names(tmp_path / "lowvram" / "conf") == yaml_names(ROOT / "conf")
    page = {path.name for path in (ROOT / "lowvram" / "results" / "report" / "page").iterdir()}
    assert {
        path.name for path in (tmp_path / "lowvram" / "results" / "report" / "page").iterdir()
    } == page  # of a report
    tops = {path.name for path in tmp_path.iterdir() if not path.name.endswith(".dist-info")}
    assert tops == {"lowvram", "hydra_plugins"}  # Hydra looks for plugins there and nowhere else
    plugins = sorted(path.name for path in (tmp_path / "hydra_plugins").iterdir())
    assert plugins == ["lowvram_optuna_sweeper.py", "lowvram_sweeper.py"]


def test_wheel_runs_without_the_repository(packages: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(packages.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "installed")
    code = "import sys; sys.path.insert(0, 'installed'); from lowvram.cli.start import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, "--cfg", "job"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert "precision:" in process.stdout


def test_sdist_leaves_out_results_and_tests(packages: Path) -> None:
    with tarfile.open(next(packages.glob("*.tar.gz"))) as sdist:
        tops = {name.split("/")[1] for name in sdist.getnames()}
    assert {"lowvram", "conf", "train.py", "pyproject.toml", "LICENSE"} <= tops
    assert tops.isdisjoint({"tests", "outputs", "docs", ".venv"})
