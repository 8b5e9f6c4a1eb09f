"""Releases of other packages that are refused when an integration is imported."""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import releases as matrix
from benchmarks.results import Run
from grpo_fused.integrations import releases
from grpo_fused.integrations.releases import check_release

KNOWN = {"1.15": "", "1.16": ""}


@pytest.mark.parametrize("installed", ["1.15.3", "1.16.0", "1.16.1.dev3"])
def test_known_releases(installed, monkeypatch):
    monkeypatch.setattr(releases, "version", lambda package: installed)
    check_release("trl", KNOWN)


@pytest.mark.parametrize("installed", ["1.14.2", "1.17.0", "1.1", "0.29.1", "2.0.0"])
def test_other_releases(installed, monkeypatch):
    monkeypatch.setattr(releases, "version", lambda package: installed)
    with pytest.raises(
        ImportError, match=rf"knows trl 1.15.\*, 1.16.\*; found trl {installed}. To try it all the same"
    ):
        check_release("trl", KNOWN)
    monkeypatch.setenv(releases.ANY_RELEASE, "1")
    with pytest.warns(UserWarning, match=rf"found trl {installed}, which has not been tested"):
        check_release("trl", KNOWN)


def test_a_range_of_releases(monkeypatch):
    monkeypatch.setattr(releases, "version", lambda package: "1.11.0")
    with pytest.raises(ImportError, match=r"knows trl 0.29 to 1.10; found trl 1.11.0"):
        check_release("trl", ["0.29", "1.9", "1.10", "1.0"])
    for installed, release in (("1.11.0", (1, 11)), ("2.0rc1", (2, 0)), ("3", (3, 0))):
        monkeypatch.setattr(releases, "version", lambda package, installed=installed: installed)
        assert releases.installed_release("trl") == release


def test_an_absent_package(monkeypatch):
    def absent(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(releases, "version", absent)
    check_release("prime-rl", KNOWN, optional=True)
    assert releases.installed_release("trl") == (0, 0)
    with pytest.raises(ImportError, match=r"needs trl 1.15.\*, 1.16.\* for this; it is not installed"):
        check_release("trl", KNOWN)


@pytest.mark.parametrize("module", ["trl", "prime_rl"])
def test_importing_an_integration_checks_the_release(module, monkeypatch):
    pytest.importorskip(f"grpo_fused.integrations.{module}", exc_type=ImportError)  # its parts keep the true release
    monkeypatch.setattr(releases, "version", lambda package: "0.1")
    monkeypatch.delitem(sys.modules, f"grpo_fused.integrations.{module}", raising=False)
    with pytest.raises(ImportError, match="found .* 0.1"):
        importlib.import_module(f"grpo_fused.integrations.{module}")


def test_a_row_for_each_release():
    """Of pytest's report: a failed test is named as such, and what was skipped is not served."""
    report = ElementTree.fromstring(
        "<testsuites><testsuite>"
        '<testcase classname="tests.integrations.test_trl" name="a"/>'
        '<testcase classname="tests.integrations.test_trl" name="b"/>'
        '<testcase classname="tests.integrations.test_trl_cli" name="c"><skipped/></testcase>'
        '<testcase classname="tests.integrations.test_trl_others" name="d"><failure/></testcase>'
        '<testcase classname="tests.integrations.test_trl_others" name="e"/>'
        '<testcase classname="tests.integrations.test_trl_truncation" name="f"/>'
        '<testcase classname="tests.integrations.test_trl_truncation" name="g"><skipped/></testcase>'
        '<testcase classname="" name="tests.integrations.test_trl_divergence"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    programs = matrix.counts(report)
    assert programs["test_trl"] == {"passed": 2, "failed": 0, "skipped": 0}
    cases = {name: {"full": False, "programs": programs} for name in ("trl 1.10.0", "trl 1.9.2")}
    machine = {"name": "M", "commit": "c", "dirty": False, "date": "2026-11-23"}
    rows = matrix.table(Run(Path("f"), machine, {"releases": {"cases": cases}})).splitlines()
    assert rows[0] == "Tests that passed, of the gate's (M, commit c, 2026-11-23):"
    assert [row.split(" | ")[0] for row in rows[4:]] == ["| trl 1.9.2", "| trl 1.10.0"]
    cells = rows[4].strip("| ").split(" | ")[1:]
    of = dict(zip(matrix.PROGRAMS, cells, strict=True))
    assert of["test_trl"] == "2"
    assert of["test_trl_truncation"] == "1, 1 skipped"
    assert of["test_trl_cli"] == matrix.NOT_THERE
    assert of["test_trl_others"] == "1 of 2 failed"
    assert of["test_trl_divergence"] == "1 of 1 failed"
