"""Releases of other packages that are refused when an integration is imported."""

from __future__ import annotations

import importlib
import subprocess
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
    assert check_release("trl", KNOWN) == (1, int(installed[2:4]))


@pytest.mark.parametrize("installed", ["1.14.2", "1.17.0", "1.1", "0.29.1", "2.0.0"])
def test_other_releases(installed, monkeypatch):
    monkeypatch.setattr(releases, "version", lambda package: installed)
    with pytest.raises(
        ImportError, match=rf"knows trl 1.15.\*, 1.16.\*; found trl {installed}. To try it all the same"
    ):
        check_release("trl", KNOWN)
    monkeypatch.setenv(releases.ANY_RELEASE, "1")
    with pytest.warns(UserWarning, match=rf"found trl {installed}, which has not been tested"):
        assert check_release("trl", KNOWN) == tuple(map(int, installed.split(".")[:2]))


def test_a_range_of_releases(monkeypatch):
    monkeypatch.setattr(releases, "version", lambda package: "1.11.0")
    with pytest.raises(ImportError, match=r"knows trl 0.29 to 1.10; found trl 1.11.0"):
        check_release("trl", ["0.29", "1.9", "1.10", "1.0"])
    for installed, known in (("2.0rc1", "2.0"), ("3", "3.0")):
        monkeypatch.setattr(releases, "version", lambda package, installed=installed: installed)
        assert check_release("trl", [known]) == (int(known[0]), 0)


def test_an_absent_package(monkeypatch):
    def absent(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(releases, "version", absent)
    assert check_release("prime-rl", KNOWN, optional=True) == (0, 0)
    with pytest.raises(ImportError, match=r"needs trl 1.15.\*, 1.16.\* for this; it is not installed"):
        check_release("trl", KNOWN)


@pytest.mark.parametrize("module", ["trl", "prime_rl"])
def test_importing_an_integration_checks_the_release(module, monkeypatch):
    pytest.importorskip(f"grpo_fused.integrations.{module}", exc_type=ImportError)
    monkeypatch.setattr(releases, "version", lambda package: "0.1")
    for part in (module, f"{module}.release"):
        monkeypatch.delitem(sys.modules, f"grpo_fused.integrations.{part}", raising=False)
    with pytest.raises(ImportError, match="found .* 0.1"):
        importlib.import_module(f"grpo_fused.integrations.{module}")


def run_of(cases, commit="c", date="2026-11-23"):
    """A file of results with the section."""
    return Run(
        Path("f"), {"device": "cpu", "commit": commit, "date": f"{date}T10:00:00"}, {"releases": {"cases": cases}}
    )


def test_an_installation_that_failed_is_repeated(monkeypatch, tmp_path):
    """A folder with TRL has what TRL needs, too."""

    def pip(command, check):
        if command[-1] == "requests":
            raise subprocess.CalledProcessError(1, command)
        (tmp_path / "build" / "trl-1.0.0" / "trl").mkdir(parents=True)

    monkeypatch.setattr(matrix, "ROOT", tmp_path)
    monkeypatch.setattr(subprocess, "run", pip)
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            matrix.installed("1.0.0")


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
    cases = {name: {"programs": programs} for name in ("trl 1.10.0", "trl 1.9.2")}
    rows = matrix.table([run_of(cases)]).splitlines()
    assert rows[0] == "Tests that passed, of the gate's:"
    assert [row.split(" | ")[0] for row in rows[4:]] == ["| trl 1.9.2", "| trl 1.10.0"]
    *cells, commit = rows[4].strip("| ").split(" | ")[1:]
    assert commit == "c, 2026-11-23"
    of = dict(zip(matrix.PROGRAMS, cells, strict=True))
    assert of["test_trl"] == "2"
    assert of["test_trl_truncation"] == "1, 1 skipped"
    assert of["test_trl_cli"] == matrix.NOT_THERE
    assert of["test_trl_others"] == "1 of 2 failed"
    assert of["test_trl_divergence"] == "1 of 1 failed"


def report_of(target, folder, **versions):
    """A report as pytest writes it."""
    properties = "".join(f'<property name="{name}" value="{value}"/>' for name, value in versions.items())
    file = folder / f"{target}.xml"
    file.write_text(
        f"<testsuites><testsuite><properties>{properties}</properties>"
        '<testcase classname="tests.with_it.test_one" name="a"/><testcase classname="tests.with_it.test_two" name="b"/>'
        '<testcase classname="tests.with_it.test_two" name="c"><skipped/></testcase></testsuite></testsuites>'
    )
    return file


def test_a_row_for_each_package(tmp_path):
    """The tests of all its files, and the releases beside it."""
    reports = (
        report_of("verl", tmp_path, verl="0.9.1", torch="2.13.0"),
        report_of("axolotl", tmp_path, axolotl="0.19.0"),
        report_of("swift", tmp_path, trl="0.29.1", **{"ms-swift": "4.6.0"}),
    )
    (section,) = matrix.run(reports=reports)
    section["cases"]["verl 0.10.0"] = {"programs": {"test_one": {"failed": 1}}}
    rows = matrix.all_packages([run_of(section["cases"])]).splitlines()
    assert rows[2:] == [
        "| axolotl 0.19.0 | 2, 1 skipped |  | c, 2026-11-23 |",
        "| ms-swift 4.6.0 | 2, 1 skipped | trl 0.29.1 | c, 2026-11-23 |",
        "| verl 0.9.1 | 2, 1 skipped | torch 2.13.0 | c, 2026-11-23 |",
        "| verl 0.10.0 | 1 of 1 failed |  | c, 2026-11-23 |",
    ]


def test_the_newest_run_of_a_release():
    """A release that was tested alone replaces its row, and no other."""
    old = {"trl 1.9.2": {"programs": {"test_trl": {"passed": 3}}}}
    both = old | {"trl 1.16.0": {"programs": {"test_trl": {"failed": 1}}}}
    new = {"trl 1.16.0": {"programs": {"test_trl": {"passed": 1}}}}
    runs = [run_of(new, "d", "2026-11-24"), run_of(both)]
    assert matrix.all_packages(runs).splitlines()[2:] == [
        "| trl 1.9.2 | 3 |  | c, 2026-11-23 |",
        "| trl 1.16.0 | 1 |  | d, 2026-11-24 |",
    ]
    assert matrix.table(runs).splitlines()[5].startswith("| trl 1.16.0 | 1 | not served |")


def test_the_report_of_failed_tests(tmp_path):
    """Its rows are yielded before the program fails."""
    report = report_of("ray", tmp_path, ray="2.60.0")
    report.write_text(report.read_text().replace("<skipped/>", "<failure/>"))
    sections = matrix.run(reports=(report,))
    assert next(sections)["cases"]["ray 2.60.0"]["programs"]["test_two"] == {"passed": 1, "failed": 1, "skipped": 0}
    with pytest.raises(SystemExit, match=r"tests failed under ray 2\.60\.0"):
        next(sections)
