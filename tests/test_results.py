"""Results are files of one schema, never overwritten, each of one machine and commit; the newest is found by its date."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results, threads
from benchmarks.results import SCHEMA, all_runs, load, machine, new_path, newest, record
from benchmarks.study import main

COMMITTED = sorted(results.RESULTS.glob("*/*.json"))


def write(
    folder: Path, name: str, *, schema: object = SCHEMA, date: str = "2026-01-01", device: str = "cpu", **sections
):
    path = folder / "some-machine" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {"device": device, "kind": "some-machine", "date": date, "commit": "abc"}
    path.write_text(json.dumps({"schema": schema, "machine": about, "sections": sections}))
    return path


def test_programs_share_a_file(tmp_path):
    out = tmp_path / "here" / "r.json"
    record("loss", {"cases": {"a": 1}}, out=out)
    record("accuracy", {"error": float("nan"), "pair": (1, 2)}, out=out)
    record("loss", {"cases": {"a": 1, "b": float("inf")}}, out=out)
    run = load(out)
    assert run.sections == {"loss": {"cases": {"a": 1, "b": None}}, "accuracy": {"error": None, "pair": [1, 2]}}
    assert {"device", "kind", "name", "cores", "threads", "native", "date", "commit", "dirty"} <= run.machine.keys()
    assert run.machine["versions"].keys() >= {"torch"}
    assert [path.name for path in out.parent.iterdir()] == ["r.json"], "no partial file stays"


@pytest.mark.parametrize(("given", "dirty"), [("1234567", False), (None, True)])
def test_a_commit_that_is_given_comes_before_that_of_git(given, dirty, monkeypatch):
    monkeypatch.setattr(results, "_git", lambda *arguments: "abcdefg")
    monkeypatch.delenv("GRPO_FUSED_COMMIT", raising=False)
    if given is not None:
        monkeypatch.setenv("GRPO_FUSED_COMMIT", given)
    about = results.machine.__wrapped__()
    assert (about["commit"], about["dirty"]) == (given or "abcdefg", dirty)


def test_a_file_is_of_one_commit(tmp_path, monkeypatch):
    out = tmp_path / "r.json"
    record("loss", {}, out=out)
    monkeypatch.setattr(results, "machine", lambda device: machine(device) | {"commit": "another"})
    with pytest.raises(ValueError, match="commit"):
        record("accuracy", {}, out=out)


def test_a_file_of_another_commit_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    out = tmp_path / "r.json"
    record("loss", {}, out=out)
    monkeypatch.setattr(results, "machine", lambda device: machine(device) | {"commit": "another"})
    monkeypatch.setattr(threads, "run", lambda rounds=5: pytest.fail("measured"))
    with pytest.raises(ValueError, match="commit .*: take a new file"):
        main("threads", ["--out", str(out)])


def test_never_overwritten(tmp_path):
    first = new_path(folder=tmp_path)
    assert first.parent.name == results.machine_kind()
    first.parent.mkdir()
    first.touch()
    second = new_path(folder=tmp_path)
    assert second != first
    assert not second.exists()


def test_newest(tmp_path):
    assert newest("cpu", "loss", all_runs(tmp_path)) is None
    write(tmp_path, "z", date="2026-01-01T10:00:00", loss={"n": 1})
    write(tmp_path, "a", date="2026-01-01T11:00:00", loss={"n": 2})
    write(tmp_path, "b", date="2026-01-02", accuracy={})
    write(tmp_path, "c", date="2026-01-03", device="cuda", loss={"n": 3})
    write(tmp_path, "d", schema=1, date="2026-01-09", loss={"n": 4})
    found = {device: newest(device, "loss", all_runs(tmp_path)) for device in ("cpu", "cuda")}
    assert found["cpu"] is not None
    assert found["cpu"].sections == {"loss": {"n": 2}}
    assert found["cuda"] is not None
    assert found["cuda"].sections == {"loss": {"n": 3}}


@pytest.mark.parametrize(
    ("text", "message"), [('{"schema"', "must be JSON: "), ("[]", "must be a JSON object; got list")]
)
def test_a_broken_file_is_named(tmp_path, text, message):
    path = tmp_path / "machine" / "a.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path} {message}"):
        newest("cpu", "loss", all_runs(tmp_path))


@pytest.mark.parametrize(
    ("schema", "message"), [(1, "measure again"), (SCHEMA + 1, "newer than this code"), (None, "")]
)
def test_other_schemas_are_refused(tmp_path, schema, message):
    path = write(tmp_path, "a", schema=schema, loss={})
    with pytest.raises(ValueError, match=f"schema {schema}.*reads {SCHEMA}.*{message}"):
        load(path)
    if schema != 1:
        with pytest.raises(ValueError, match="schema"):
            newest("cpu", "loss", all_runs(tmp_path))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.name)
def test_committed_results(path):
    """They can be read, or are of an older schema."""
    found = json.loads(path.read_text())
    if found["schema"] == SCHEMA:
        run = load(path)
        assert run.machine["kind"] == path.parent.name
        assert run.machine["commit"] in path.name
    else:
        assert found["schema"] in range(SCHEMA)
