"""The README and docs/ are right: every Python block runs and prints the page's output, commands and files exist.

`doc_runner.py` runs the blocks; `python tests/doc_runner.py --write` puts their current output into the pages.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from doc_runner import PAGES, PREPARED, ROOT, Small, blocks, run_page

from grpo_fused.__main__ import main as grpo_fused_command

API = sorted(f"docs/api/{path.name}" for path in (ROOT / "docs" / "api").glob("*.md"))
"""What the site shows the docstrings of."""
FRAGMENTS = {
    "docs/extending.md": 1,
    "docs/faq.md": 2,
    "docs/integrations.md": 4,
    "docs/scaling.md": 2,
    "docs/vllm.md": 1,
}
"""Blocks that are not run; a new one must be counted here."""


def in_gate(page):
    """Pages that start processes run in the full grid only."""
    return not any(block.ranks for block in blocks(page))


@pytest.mark.gate(keep=in_gate)
@pytest.mark.parametrize("page", PAGES)
def test_python_runs(page, tmp_path):
    names: dict[str, Any] = {}
    for block, printed, current in run_page(page, tmp_path):
        names = current
        if block.output is not None:
            assert_same_text(printed, block.output, str(block))
    if page in EXPECTED:
        EXPECTED[page](names)


def assert_same_text(got: str, want: str, where: str) -> None:
    """The same words; errors (1e-6) within a factor of 4, other numbers within 5 % and half a unit."""
    number = r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?"
    assert re.sub(number, "#", got).split() == re.sub(number, "#", want).split(), f"{where} prints\n{got}"
    for mine, theirs in zip(re.findall(number, got), re.findall(number, want), strict=True):
        a, b = float(mine), float(theirs)
        if "e" in mine or "e" in theirs:
            near = a == b or (a * b > 0 and 1 / 4 <= a / b <= 4)
        else:
            near = abs(a - b) <= 0.05 * abs(b) + (0.5 if "." not in theirs and abs(b) > 1 else 0)
        assert near, f"{where} prints {mine} where the page has {theirs}:\n{got}"


def _readme_is_equivalent(names: dict[str, Any]) -> None:
    """The loss in plain PyTorch equals that of the call, and so do its gradients: on-policy, the ratio is 1."""
    out, loss, hidden = names["out"], names["loss"], names["hidden_states"]
    assert names["lm_head_weight"].grad.norm() > 0
    assert out.loss.abs() < 1e-6, "advantages of one group of equal lengths add up to 0"
    torch.testing.assert_close(loss.detach(), out.loss.detach(), rtol=0, atol=1e-5)
    mine, hidden.grad = hidden.grad.clone(), None
    loss.backward()
    assert (mine - hidden.grad).norm() < 0.02 * hidden.grad.norm()


def _heads_give_the_models_log_probs(names: dict[str, Any]) -> None:
    from integrations.tiny import log_probs

    want = log_probs(names["model"](input_ids=names["input_ids"]).logits.float(), names["input_ids"])
    torch.testing.assert_close(names["out"].logps, want, rtol=0, atol=2e-4)


EXPECTED = {"README.md": _readme_is_equivalent, "docs/heads.md": _heads_give_the_models_log_probs}
"""Assertions after a page has run, besides its own."""
LANGUAGES = {"python", "bash", "text", "cpp", "json", "yaml"}


def test_blocks_that_are_not_run_have_a_reason():
    """Every Python block runs or gives a reason, and their number is known."""
    fragments = [block for page in PAGES for block in blocks(page) if block.not_run is not None]
    assert all(block.not_run for block in fragments)
    assert {page: sum(block.page == page for block in fragments) for page in PAGES if page in FRAGMENTS} == FRAGMENTS
    assert len(fragments) == sum(FRAGMENTS.values()), [str(block) for block in fragments]
    assert {block.language for page in PAGES for block in blocks(page)} <= LANGUAGES
    unknown = {name for page in PAGES for block in blocks(page) for name in block.needs} - PREPARED.keys()
    assert not unknown


PROSE = [*PAGES, *API, "CONTRIBUTING.md", "csrc/README.md", "examples/recipes/README.md"]


def commands(page: str) -> Iterator[str]:
    """Lines of shell blocks, and commands in running text."""
    for block in blocks(page):
        if block.language == "bash":
            yield from (line.split("#")[0].strip() for line in block.code.splitlines() if line.split("#")[0].strip())
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", text):
        if re.match(r"(make|python|torchrun)\s", code):
            yield " ".join(code.split())


def test_the_readme_is_short():
    """What it is, how to get it and for whom are in the first screen; the whole is at most 150 lines."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    first = "\n".join(lines[:20])
    for words in ("docs/plots/summary.svg", "**Use it**", "**Do not use it yet**", "git clone ", "pip install -e "):
        assert words in first, words


def test_commands_are_found():
    """The pattern must find them."""
    assert "make demo" in list(commands("README.md"))
    assert any("torchrun" in command for command in commands("docs/scaling.md"))


@functools.cache
def options_of_train() -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit, match="0"):
        grpo_fused_command(["train", "--help"])
    return printed.getvalue().replace("-", "_")


@pytest.mark.parametrize("page", PROSE)
def test_commands_exist(page):
    targets = re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for command in commands(page):
        words = command.split()
        if words[0] == "make":
            named = [word for word in words[1:] if "=" not in word]
            assert set(named) <= set(targets), f"{page}: {command}"
            continue
        if words[0] in ("pip", "git", "hf"):
            continue
        if words[0] == "grpo-fused":
            words = ["python", "-m", "grpo_fused", *words[1:]]
        if "-m" in words:
            name, *arguments = words[words.index("-m") + 1 :]
            if name in ("pytest", "pip", "venv"):
                continue
            source = _module(name, arguments)
            assert source is not None, f"{page}: {command}: there is no module {name}"
        else:
            script = next((word for word in words[1:] if word.endswith(".py")), None)
            if script is None:
                assert words[0] == "torchrun", f"{page}: {command}: runs nothing"
                continue
            arguments, source = words[words.index(script) + 1 :], (ROOT / script).read_text()
        if arguments[:1] == ["train"]:
            known = options_of_train()
            for flag in (word for word in arguments if word.startswith("--")):
                assert f"__{flag[2:].replace('-', '_')} " in known, f"{page}: {command}: {flag} is no option"
            for file in (word for word in arguments if word.endswith(".yaml")):
                written = {block.file for block in blocks(page)}
                assert file in written or (ROOT / file).exists(), f"{page}: {command}"
            continue
        for flag in (word for word in arguments if word.startswith("--")):
            shared = (ROOT / "benchmarks" / "measure.py").read_text() if "measure" in source else ""
            parameter = flag[2:].removeprefix("no-").replace("-", "_")  # of a study's `run`
            study = re.search("benchmarks.(study|command) import", source) and (
                f"{parameter}:" in source or flag == "--out"
            )
            known = f'"{flag}"' in source + shared or study or words[1] == "setup.py"
            assert known, f"{page}: {command}: {flag} is no option"


def _module(name: str, arguments: list[str]) -> str | None:
    """Source of the module that parses the arguments."""
    if name == "grpo_fused":
        from grpo_fused.__main__ import COMMANDS

        assert not arguments or arguments[0] in COMMANDS or arguments[0].startswith("<"), arguments
        name = f"grpo_fused.{COMMANDS[arguments[0]][0]}" if arguments and arguments[0] in COMMANDS else name
    base = ROOT / Path(*name.split("."))
    for path in (base.with_suffix(".py"), base / "__main__.py"):
        if path.exists():
            return path.read_text()
    return None


@pytest.mark.parametrize("page", PROSE)
def test_links_and_files_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert target.startswith("http") or ((ROOT / page).parent / target).exists(), f"{page}: {target}"
    homes = (ROOT, ROOT / "grpo_fused", ROOT / page, (ROOT / page).parent)
    for code in re.findall(r"`([^`\s]+)`", text):
        ours = not code.startswith("liger_kernel/")
        if ours and re.fullmatch(r"[\w./-]+/[\w.-]+\.(py|md|h|cpp|cuh?|toml|txt)", code):
            assert any((home / code).exists() for home in homes), f"{page}: {code}"


def test_your_task_trains_a_tiny_model(tmp_path, monkeypatch):
    """The files of the page, with its commands; only the model is smaller, and the run shorter."""
    from grpo_fused.__main__ import main
    from grpo_fused.trainer.metrics import read_jsonl

    page = "docs/your_task.md"
    monkeypatch.chdir(tmp_path)
    for block in blocks(page):
        if block.file is not None:
            Path(block.file).write_text(block.code, encoding="utf-8")
    model = Small(tmp_path).prepare("path", {})
    shorter = ["--model", model, "--steps", "1", "--max_completion_length", "4", "--num_generations", "2"]
    for command in commands(page):
        if command.startswith("grpo-fused"):
            arguments = command.split()[1:]
            real = arguments[0] == "train" and "--dry-run" not in arguments
            main([*arguments, *shorter] if real else arguments)
    rows = [row for row in read_jsonl(Path("runs/capitals/metrics.jsonl")) if row["step"] == 1]
    assert "rewards/short_answer" in rows[0]


def test_recipes_to_copy_are_those_that_ran():
    """The page has the files themselves, and the options of the study; the others are said not to have run."""
    from benchmarks.pretrained import recipe
    from grpo_fused.trainer.cli import read_recipe
    from grpo_fused.trainer.reading import Loader

    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    shown = re.findall(r"\((\.\./examples/[^)]*\.yaml)\):\n\n```yaml\n(.*?)```", page, re.DOTALL)
    assert len(shown) == 3
    for file, text in shown:
        assert (ROOT / "docs" / file).read_text(encoding="utf-8") == text, file
    (study,) = (block.code for block in blocks("docs/recipes.md") if "runs/gemma" in block.code)
    (options,) = [Loader(study).get_single_data()]
    words = [word for name, value in options.items() for word in (f"--{name}", json.dumps(value).strip('"'))]
    assert read_recipe(words)[0] == recipe("runs/start", Path("runs/gemma"), 0)
    files = sorted((ROOT / "examples").glob("*/*.yaml"))
    assert len(files) > 10
    for file in files:
        name = file.relative_to(ROOT).as_posix()
        (row,) = re.findall(rf"^\| \[`{name}`\].*$", page, re.MULTILINE)
        is_run = file.parent.name == "small"
        assert ("not run" in row) != is_run, row
        assert ("# Not run yet" in file.read_text(encoding="utf-8")) != is_run, name


def test_the_notebook_runs():
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    AcceleratorState._reset_state(reset_partial_state=True)
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in cells:
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), f"quickstart.ipynb, {cell['id']}", "exec"), names)
    first, *_, last = (metrics["reward"] for metrics in names["history"])
    assert last > first + 0.2


PUBLIC = [
    "grpo_fused", "grpo_fused.integrations.liger", "grpo_fused.integrations.trl", "grpo_fused.objectives",
    "grpo_fused.rewards", "grpo_fused.trainer",
]  # fmt: skip
"""Modules whose `__all__` is public."""


def test_every_public_name_has_a_place_on_the_site():
    """One: `::: name` on a page of docs/api. Any other name there exists, too; the build of the site is strict."""
    texts = [(ROOT / page).read_text(encoding="utf-8") for page in API]
    places = [name for text in texts for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
    assert len(places) == len(set(places))
    names = {f"{module}.{name}" for module in PUBLIC for name in _all_of(module)}
    assert len(names) > 80
    assert not names - set(places)
    for name in set(places) - names:
        module, _, last = name.rpartition(".")
        source = (ROOT / Path(*module.split("."))).with_suffix(".py").read_text(encoding="utf-8")
        assert re.search(rf"^(class |def |){last}\b", source, re.MULTILINE), name


def _all_of(module: str) -> list[str]:
    """`__all__`, without an import: not every integration's package is installed."""
    folder = ROOT / Path(*module.split("."))
    for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{module} has no __all__")


def test_every_page_is_in_the_sites_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].partition("\n\n")[0]
    listed = sorted(re.findall(r": (\S+\.md)$", nav, re.MULTILINE))
    ours = [page.removeprefix("docs/") for page in (*PAGES, *API) if page != "README.md"]
    assert listed == sorted([*ours, "index.md", "changes.md"])  # of the README and the changelog


def fields_of(package: str, file: str, name: str) -> set[str]:
    """The fields of a dataclass of an installed package, without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    items = [item for item in found.body if isinstance(item, ast.AnnAssign)]
    names = {ast.unparse(item.target) for item in items if not ast.unparse(item.annotation).startswith("ClassVar")}
    return {name for name in names if not name.startswith("_")}


def test_every_option_of_trl_is_mapped():
    theirs = fields_of("trl", "trainer/grpo_config.py", "GRPOConfig")
    theirs |= fields_of("trl", "trainer/base_config.py", "_BaseConfig")
    theirs |= fields_of("transformers", "training_args.py", "TrainingArguments")
    text = (ROOT / "docs/from_trl.md").read_text(encoding="utf-8")
    assert not theirs - set(re.findall(r"`(\w+)`", text))


def test_options_that_trl_maps_to_are_ours():
    ours = {
        *fields_of("grpo_fused", "trainer/config.py", "GRPOTrainerConfig"),
        *fields_of("grpo_fused", "trainer/recipe.py", "Recipe"),
        *(f"loss.{name}" for name in fields_of("grpo_fused", "call/config.py", "GRPOLossConfig")),
        "--resume",
    }
    text = (ROOT / "docs/from_trl.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `\w+` \| (`[^|]+`) \|", text, re.MULTILINE)
    mapped = {name for row in rows for name in re.findall(r"`([^`]+)`", row)}
    assert len(rows) > 60
    assert not mapped - ours
    lists = re.findall(r"Ours only:\s(.*?)\.\n", text, re.DOTALL)
    only_ours = {name for words in lists for name in re.findall(r"`([^`]+)`", words)}
    assert only_ours <= ours
    loss = {name for name in ours if name.startswith("loss.")}
    assert loss <= mapped | only_ours | {"loss.max_completion_length"}


def test_places_to_extend_exist():
    """Each row of the table: names, and the file that has them."""
    rows = re.findall(r"^\|[^|]*\|([^|]*)\| `([\w/.]+)` \|$", (ROOT / "docs/extending.md").read_text(), re.MULTILINE)
    assert len(rows) >= 8
    for names, path in rows:
        found = re.findall(r"`(\w+)`", names)
        assert found, path
        for name in found:  # where it is defined, not where it is used
            made = rf"^\s*(?:.*\b(?:def|class) {name}\b|{name}\b.* = |{name}: |.*> {name}\()"
            assert re.search(made, (ROOT / path).read_text(), re.MULTILINE), f"{path} does not define {name}"


def test_comparison_of_output_finds_differences():
    assert_same_text("off by 3e-06, 0.93 of 519 MiB", "off by 4e-06, 0.935 of 519 MiB", "")
    for got in ("off by 9e-04", "off by 0e+00", "on by 4e-06"):
        with pytest.raises(AssertionError):
            assert_same_text(got, "off by 4e-06", "")
    for got, want in (("3 products", "4 products"), ("(80, 80)", "(80, 48)"), ("[0.1, nan]", "[0.1, 0.0]")):
        with pytest.raises(AssertionError):
            assert_same_text(got, want, "")
