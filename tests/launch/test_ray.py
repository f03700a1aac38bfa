"""What Ray is asked, what its answers mean, and the script of a job, which runs under bash. tests/cli/test_ray.py has a
real Ray."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from lowvram.config.errors import BadInput, Refused
from lowvram.config.schema import build
from lowvram.launch.launcher import Queued, Unsure, Work
from lowvram.launch.ray import Ray, entrypoint, jobs_in, script
from lowvram.launch.ray_api import address_from, token_of
from tests.fake_ray import FakeRay, Said, fake_ray

NAME = "seed1-0a1b2c3d"
FAILS = 'Traceback (most recent call last):\n  File "x"\nRuntimeError: no agent\n.\n'


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeRay]:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with fake_ray() as made:
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", made.address)
        yield made


def ray(**values: Any) -> Ray:
    """As the YAML with these values makes it."""
    return build(OmegaConf.create({"_target_": "lowvram.launch.ray.Ray", **values}), "launcher")


def work(folder: Path, command: tuple[str, ...] = ("python", "train.py", "name=it's")) -> Work:
    folder.mkdir(parents=True, exist_ok=True)
    return Work(NAME, "0a1b2c3d", folder, command, folder.parent)


def test_values_that_ray_could_not_take_are_refused() -> None:
    some = "above 0 where a job asks for nothing else: Ray would start all jobs at once, on its head"
    for values, sentence in (
        ({"address": "head:8265"}, "launcher.address='head:8265': must be null or the address of the cluster's dash"),
        ({"address": "http://a:hf_abcdefghijklmnopqrst@h"}, "launcher.address='http://a:<refused>@h': must be null or"),
        ({"address": "ray://head:10001"}, "launcher.address='ray://head:10001': must be null or the address"),
        ({"num_gpus": 1.5}, "launcher.num_gpus=1.5: must be from 0 to 1, or a whole number"),
        ({"num_gpus": -1}, "launcher.num_gpus=-1.0: must be from 0 to 1, or a whole number"),
        ({"num_gpus": "two"}, "launcher.num_gpus='two': must be a number"),
        ({"num_cpus": -1}, "launcher.num_cpus=-1.0: must be at least 0"),
        ({"num_cpus": 0, "num_gpus": 0}, f"launcher.num_cpus=0.0: must be {some}"),
        ({"memory": "32"}, "launcher.memory='32': must be null or a number above 0 with a unit"),
        (
            {"resources": ["GPU:1"]},
            "launcher.resources=['GPU:1']: must be without GPU: type launcher.num_cpus, launcher",
        ),
        ({"resources": ["a100:0"]}, "launcher.resources=['a100:0']: must be a list of NAME:NUMBER, such as [a100:1]"),
        ({"resources": ["a100"]}, "launcher.resources=['a100']: must be a list of NAME:NUMBER, such as [a100:1]"),
        ({"resources": "a100:1"}, "launcher.resources='a100:1': must be a list of texts"),
        ({"grace_s": 0}, "launcher.grace_s=0: must be from 1 to 86400 seconds"),
        ({"env": "PATH"}, "launcher.env='PATH': must be a list of texts"),
        ({"retries": 3}, "launcher.retries=3: must be removed: launcher knows address, num_gpus, num_cpus"),
    ):
        with pytest.raises(BadInput) as refused:
            ray(**values)
        assert str(refused.value).startswith(sentence), refused.value
    assert ray(num_gpus=0.5, num_cpus=0).num_gpus == 0.5


def test_a_cluster_is_looked_for_where_ray_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for values, address in (
        ({}, "http://127.0.0.1:8265"),
        ({"RAY_ADDRESS": "auto"}, "http://127.0.0.1:8265"),
        ({"RAY_ADDRESS": "https://[::1]:8265/"}, "https://[::1]:8265"),
        ({"RAY_ADDRESS": "10.0.0.1:6379", "RAY_API_SERVER_ADDRESS": "http://head:8265"}, "http://head:8265"),
    ):
        assert address_from(values) == address
    with pytest.raises(
        BadInput, match=r"RAY_ADDRESS='10\.0\.0\.1:6379': must be the address of the cluster's dashboard"
    ):
        address_from({"RAY_ADDRESS": "10.0.0.1:6379"})


def test_a_job_asks_for_what_was_typed(there: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", "/hub")
    asked = ray(
        num_gpus=2, num_cpus=4, memory="2GiB", resources=["accelerator_type:A100:0.5"], grace_s=9, env=["HF_HOME"]
    )
    assert asked.submit(work(tmp_path / "it's here")) == NAME
    job = there.jobs[NAME]
    assert "name=" not in job["entrypoint"]
    assert {key: value for key, value in job.items() if key not in ("entrypoint", "status", "message")} == {
        "submission_id": NAME,
        "entrypoint_num_gpus": 2,
        "entrypoint_num_cpus": 4,
        "entrypoint_memory": 2**31,
        "entrypoint_resources": {"accelerator_type:A100": 0.5},
        "runtime_env": {
            "env_vars": {"HF_HOME": "/hub", "LOWVRAM_SUBMITTED": "0a1b2c3d", "RAY_JOB_STOP_WAIT_TIME_S": "9"}
        },
    }
    ray(num_gpus=0).submit(work(tmp_path / "a"))
    assert not {key for key in there.jobs[NAME] if key.startswith("entrypoint_")} - {"entrypoint_num_cpus"}


def test_only_variables_that_are_set_and_no_secret_go_to_a_job(there: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("MINE", "hf_abcdefghijklmnopqrst")
    for name, allowed in (("NOT_SET", "a list of variables that are set here"), ("WANDB_API_KEY", "without secrets")):
        with pytest.raises(BadInput, match=rf"launcher\.env=\['{name}'\]: must be {allowed}"):
            ray(env=["PATH", name]).check()
    with pytest.raises(BadInput, match=r"launcher\.env=\['MINE'\]: must be without secrets"):
        ray(env=["MINE"]).check()
    ray(env=["PATH"]).check()


def test_who_is_no_ray_is_refused(there: FakeRay) -> None:
    ray().check()
    for said, sentence in (
        ((200, "<html>hello"), f"what answers at {there.address} isn't the dashboard of a Ray cluster: type launcher."),
        ((200, '{"version": "4"}'), f"what answers at {there.address} isn't the dashboard"),
        ((404, "404: Not Found"), f"{there.address} has answered HTTP 404: 404: Not Found"),
        (
            (403, ""),
            f"{there.address} has answered HTTP 403: it says no reason: the cluster wants its token in RAY_AUTH",
        ),
        (None, f"nothing answers at {there.address}: Remote end closed connection without response; start Ray"),
    ):
        there.says["GET /api/version"] = said
        with pytest.raises(Refused) as refused:
            ray().check()
        assert str(refused.value).startswith(f"launcher=ray: {sentence}"), refused.value
    with pytest.raises(Refused, match=r"launcher=ray: nothing answers at http://127\.0\.0\.1:1: .*refused; start Ray"):
        ray(address="http://127.0.0.1:1/").check()


def test_the_token_goes_to_the_cluster_alone(there: FakeRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("of-home\n")
    (tmp_path / "token").write_text("of-a-file\n")
    ray().check()
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    ray().check()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "typed")
    ray().check()
    with fake_ray() as other:
        there.says["GET /api/version"] = (302, f"{other.address}/api/version")
        with pytest.raises(Refused, match="has answered HTTP 302"):
            ray().check()
        assert other.tokens == []
    assert there.tokens == ["Bearer of-home", "Bearer of-a-file", *["Bearer typed"] * 2]
    assert token_of({"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": "x"}) is None
    with pytest.raises(Refused, match=r"RAY_AUTH_TOKEN_PATH=/nowhere: can't be read: .*No such file"):
        token_of({"RAY_AUTH_TOKEN_PATH": "/nowhere"})


@pytest.mark.parametrize(
    ("said", "takes", "kind", "sentence"),
    [
        ((400, FAILS), False, Refused, "has answered HTTP 400: RuntimeError: no agent"),
        ((401, "Unauthorized"), False, Refused, "has answered HTTP 401: Unauthorized: the cluster wants its token in"),
        ((500, FAILS), False, Refused, "has answered HTTP 500: RuntimeError: no agent"),
        ((500, FAILS), True, None, ""),
        (
            (504, "Gateway Timeout"),
            False,
            Unsure,
            "hasn't said whether it takes the job: HTTP 504: Gateway Timeout; if",
        ),
        (
            (200, "<html>"),
            False,
            Unsure,
            "hasn't said whether it takes the job: HTTP 200: <html>; if it has made a job",
        ),
        ((200, "<html>"), True, None, ""),
        (
            None,
            False,
            Unsure,
            "hasn't said whether it takes the job: Remote end closed connection without response; if",
        ),
        (None, True, None, ""),
    ],
)
def test_what_ray_answers_to_a_job(
    there: FakeRay, tmp_path: Path, said: Said, takes: bool, kind: type[Refused] | None, sentence: str
) -> None:
    there.says["POST"], there.takes = said, takes
    if kind is None:
        assert ray().submit(work(tmp_path / "p")) == NAME
        return
    with pytest.raises(Refused) as refused:
        ray().submit(work(tmp_path / "p"))
    assert type(refused.value) is kind
    assert str(refused.value).startswith(f"launcher=ray: {there.address} {sentence}"), refused.value


def test_jobs_that_have_ended_are_left_out(there: FakeRay) -> None:
    states = ("PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED", "SOMETHING_NEW")
    listed = [{"submission_id": f"j-{state}", "status": state} for state in states]
    there.jobs = {job["submission_id"]: job for job in listed}
    living = [Queued(f"j-{state}", f"j-{state}", state) for state in ("PENDING", "RUNNING", "SOMETHING_NEW")]
    assert ray().jobs() == living
    assert jobs_in([None, "x", {"status": "RUNNING"}, {"submission_id": "a"}]) == [Queued("a", "a", "None")]
    for said, sentence in (
        ((200, "{}"), "doesn't tell which jobs there are: try again later"),
        ((500, FAILS), "has answered HTTP 500: RuntimeError: no agent"),
    ):
        there.says["GET /api/jobs/"] = said
        with pytest.raises(Refused, match=sentence):
            ray().jobs()
    with pytest.raises(Refused, match="so nobody knows which jobs there are: try again later"):
        ray(address="http://127.0.0.1:1").jobs()


def test_how_a_job_ended_is_one_line(there: FakeRay) -> None:
    log = "Job entrypoint command failed with exit code -9, last available logs (truncated to 20,000 chars):\nhello\n"
    there.jobs = {NAME: {"submission_id": NAME, "status": "FAILED", "message": log}}
    assert ray().how_ended(NAME) == "FAILED: Job entrypoint command failed with exit code -9"
    assert ray().how_ended("gone") == ""
    assert ray(address="http://127.0.0.1:1").how_ended(NAME) == ""


def run(command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """As Ray runs the command of a job."""
    known = {"PATH": os.environ["PATH"], "LOWVRAM_SUBMITTED": "0a1b2c3d", "PYTHONBREAKPOINT": "ray.set_trace", **env}
    return subprocess.run(command, shell=True, env=known, capture_output=True, text=True, timeout=60, check=False)


def test_a_job_runs_its_point_with_the_log_beside_it(tmp_path: Path) -> None:
    told = ("sh", "-c", 'echo "$(pwd) $CUDA_VISIBLE_DEVICES-$PYTHONBREAKPOINT- $1"; exit 7', "sh", 'it\'s "$x"')
    point = work(tmp_path / "s $y" / "0", told)
    for num_gpus, cards in ((1, "1"), (0, "")):
        (point.folder / "queue_job.sh").write_text(script(ray(num_gpus=num_gpus), point))
        done = run(entrypoint(point), CUDA_VISIBLE_DEVICES="1")
        assert (done.returncode, done.stdout) == (7, f"the log is {point.folder}/queue_job.log\n"), done.stderr
        log = (point.folder / "queue_job.log").read_text().splitlines()
        assert log[-2].startswith(f"Ray job {NAME} on ")
        assert log[-2].endswith(f"CUDA_VISIBLE_DEVICES={cards}")
        assert log[-1] == f'{point.cwd} {cards}-- it\'s "$x"'
    assert len(log) == 4


def test_a_job_that_is_not_the_newest_of_its_point_runs_nothing(tmp_path: Path) -> None:
    point = work(tmp_path / "p", ("touch", "ran"))
    (point.folder / "queue_job.sh").write_text(script(ray(), point))
    done = run(entrypoint(point), LOWVRAM_SUBMITTED="older")
    assert (done.returncode, done.stdout) == (1, f"this job isn't the newest of {point.folder}: it runs nothing\n")
    assert not (tmp_path / "ran").exists()


def test_a_node_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    point = work(tmp_path / "it's far")
    point.folder.rmdir()
    done = run(entrypoint(point))
    assert done.returncode == 1
    sentence = (
        f": this node doesn't see {point.folder}: the folder of a point must be on storage that all nodes share\n"
    )
    assert done.stdout.endswith(sentence)
    assert not point.folder.exists()
