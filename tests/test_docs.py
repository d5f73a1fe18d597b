"""The documents: examples that run, names that exist, links that hold on the site and off it."""

import ast
import collections
import dataclasses
import doctest
import importlib.util
import re
import tomllib
from pathlib import Path

import jax
import pytest

import jaxkern
from bench import figures
from bench.cases import TABLE
from jaxkern.lm.config import PRESETS
from jaxkern.lm.model import initial_params
from tests.documents import DOCUMENTS, ROOT, RUN, docstrings, examples, modules

README = ROOT / "README.md"
EVERY = [*DOCUMENTS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
SITE = ROOT / ".site"
SPEED = (SITE / "guide" / "speed.md").read_text()


def script(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


pages = script(SITE / "pages.py")


def slow(names, of):
    """Parameters of which these are in the exhaustive suite."""
    name = lambda value: getattr(value, "stem", value)
    marks = lambda value: [pytest.mark.exhaustive] * (name(value) in names)
    return [pytest.param(value, id=name(value), marks=marks(value)) for value in of]


TRAINED = {"layers", "language_model", "hybrids", "sequences", "optimizers"}
TRAINED |= {"start", "your_model", "mixed_precision", "remat"}
COMPILED = {"nn.equinox", "nn.flax", "nn.linen", "lm.sample"}
COMPILED |= {f"ops.{op}.op" for op in ("causal_conv1d", "selective_scan", "ssd")}


@pytest.mark.parametrize("path", slow(TRAINED, DOCUMENTS))
def test_examples_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if RUN in "".join(examples(path)):
        from jaxkern.__main__ import main

        (tmp_path / "text").write_text("def main(): pass\n" * 100)
        options = ["--data", "text", "--steps", "1", "--batch-size", "2", "--seq-len", "16"]
        assert main(["train", "--preset", "micro", "--out", RUN, *options]) in (0, None)
    names = {"__name__": "example"}  # a page is read from its top
    for number, example in enumerate(examples(path)):
        exec(compile(example, f"{path.name}[{number}]", "exec"), names)


@pytest.mark.parametrize("module", slow({f"jaxkern.{name}" for name in COMPILED}, modules()))
def test_examples_of_docstrings_run(module):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in docstrings(module):
        runner.run(test)
    assert runner.tries
    assert runner.failures == 0


PLAIN = ROOT / "jaxkern", ROOT / "bench"


def test_docstrings_begin_with_a_verb_or_a_noun():
    """Checks modules, classes, functions and the strings that describe constants."""
    begins = re.compile(r"(What|Where|Those|That of|Of|So|How|As many)\b")
    strings = [
        (path.relative_to(ROOT), statement.lineno, statement.value.value)
        for folder in PLAIN
        for path in sorted(folder.rglob("*.py"))
        for statement in ast.walk(ast.parse(path.read_text()))
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    ]
    assert strings
    wrong = [(path, line, text) for path, line, text in strings if begins.match(str(text))]
    assert [f"{path}:{line}: {text.splitlines()[0]}" for path, line, text in wrong] == []


def test_readme_is_short_and_has_an_example():
    assert len(README.read_text().splitlines()) <= 130
    assert examples(README)


def test_figures_are_beside_the_fastest_competitor():
    """Over every file of an H200; ours is of the file that has it, where one has both."""
    found = collections.defaultdict(list)
    results = figures.Results.load()
    for row in results.rows:
        if (row["gpu"], row["dtype"]) == ("NVIDIA H200", "bfloat16"):
            key = row["op"], row["shape"], row["direction"]
            found[key].append((row["us"], row["implementation"], row["commit"]))
    for op, shape, direction in [
        ("selective_scan", "8x2048x2048x16", "backward"),
        ("selective_scan", "4x4096x5120x16", "forward"),
        ("dropout", "16384x8192", "forward"),
        ("rms_norm", "16384x4096", "forward"),
    ]:
        line = results.line(op, shape, direction)
        rows = found[op, shape, direction]
        us, rival, commit = min(r for r in rows if r[1] not in ("mosaic", "auto", "xla", "jax"))
        assert (line.rival, line.figures[rival]["us"]) == (rival, us)
        assert (line.own["us"], "mosaic", commit) in rows
        assert f"{figures.NAMES[rival]} {us:.3g} µs" in SPEED or us >= 1000


def test_parameters_of_the_headline_are_those_of_the_model():
    preset, vocabulary = re.fullmatch(r"(\w+), vocabulary ([\d,]+)", figures.MODEL[0]).groups()
    size = int(vocabulary.replace(",", ""))
    model = dataclasses.replace(PRESETS[preset].model, vocab_size=size)
    params = jax.eval_shape(lambda: initial_params(model, 0))
    millions = sum(p.size for p in jax.tree.leaves(params)) / 1e6
    said = f"A Mamba of {millions:.0f} million parameters (vocabulary of {vocabulary})"
    assert said in " ".join(README.read_text().split())


def test_readme_has_every_op_and_the_reference_every_name():
    """In the families and in the order of ``jaxkern.__all__``."""
    table = README.read_text().partition("## The ops")[2].partition("\n## ")[0]
    index = re.findall(r"^reference/\w+$", (SITE / "index.md").read_text(), re.MULTILINE)
    reference = "\n".join((SITE / f"{page}.rst").read_text() for page in index)
    described = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", reference, re.MULTILINE)
    assert described == [name for name in jaxkern.__all__ if name != "precision"]
    ops = [
        name for name in described if name not in ("default_implementation", "lowering_for", "Gpu")
    ]
    assert [name for name in ops if f"`{name}`" not in table] == []
    public = {case.op for case in TABLE} - {"mlp"}  # a block of several
    assert public <= set(ops)
    assert table.index("`selective_scan`") < table.index("`gelu`")


@pytest.mark.parametrize("library", ["flax", "linen", "equinox"])
def test_reference_has_what_a_module_of_layers_takes_from_another(library):
    """Sphinx describes by itself what the module defines, not what it hands on or leaves out."""
    tree = ast.parse((ROOT / "jaxkern" / "nn" / f"{library}.py").read_text())
    names = [
        alias.name
        for statement in ast.walk(tree)
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name
    ]
    reference = (SITE / "layers.rst").read_text()
    left_out = rf"automodule:: jaxkern\.nn\.{library}\n(?:   .*\n)*?   :exclude-members: (.*)"
    names += re.findall(left_out, reference)[0].split(", ")
    assert names
    assert [name for name in names if f":: jaxkern.nn.{library}.{name}\n" not in reference] == []


def test_documents_name_only_commands_and_flags_that_exist(capsys):
    from jaxkern.__main__ import main

    blocks = "".join(block for path in DOCUMENTS for block in examples(path, "sh"))
    named = re.findall(r"^(?:jaxkern|make) (train|sample|doctor)\b(.*?)(?:#.*)?$", blocks, re.M)
    assert {command for command, _ in named} == {"train", "sample", "doctor"}
    for command, rest in named:
        with pytest.raises(SystemExit) as exit:
            main([command, "--help"])
        assert exit.value.code == 0
        flags = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
        assert set(re.findall(r"--[a-z-]+", rest)) <= flags, command


def test_documents_name_only_make_targets_that_exist():
    targets = set(re.findall(r"^\.PHONY: (\w+)$", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "".join(path.read_text() for path in EVERY)
    named = set(re.findall(r"`make ([a-z]+)|^make ([a-z]+)", text, re.MULTILINE))
    named = {name for pair in named for name in pair if name}
    assert {"train", "test", "bench", "docs"} <= named <= targets


def test_documents_name_only_files_that_exist():
    text = "".join(path.read_text() for path in EVERY)
    named = set(re.findall(r"\b(?:jaxkern|tests|bench|constraints)/[\w/]+\.\w+", text))
    assert len(named) >= 4
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_documents_do_not_say_that_nobody_else_does_it():
    texts = [*EVERY, ROOT / "pyproject.toml", *(ROOT / "notebooks").glob("*.ipynb")]
    texts += [*SITE.rglob("*.rst"), *SITE.rglob("*.md"), Path(jaxkern.__file__)]
    alone = r"\b(?:the (?:first|only) (?:\w+ )?(?:library|package|kernels?)|no(?:body| one) else)\b"
    assert [path.name for path in texts if re.search(alone, path.read_text(), re.I)] == []


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_links_of_documents_hold(path):
    """On the site: `on_site` refuses a link to what is not there."""
    places = pages.files()
    places.setdefault(path, path.name)
    text = pages.on_site(path.read_text(), path, places)
    assert not re.search(r"\]\(\.\./\.\./", text)


def test_links_off_the_site_are_left_out_of_what_a_registry_shows():
    """A registry has the README alone: no link of it may be relative."""
    hook = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["metadata"]
    hook = hook["hooks"]["fancy-pypi-readme"]
    assert hook["fragments"] == [{"path": "README.md"}]
    text = README.read_text()
    for change in hook["substitutions"]:
        text = re.sub(change["pattern"], change["replacement"], text)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert [to for to in links if not to.startswith("https://")] == []
    assert "such as one sequence of 1,048,576 tokens on four" in text
    assert examples(README)[0] in text


def test_links_are_moved_to_the_places_of_pages():
    here = ROOT / ".site" / "guide" / "norms.md"
    places = {here: "guide/norms.md", ROOT / "bench" / "report.md": "bench/report.md"}
    moved = pages.on_site(
        "# `linear`\n"
        "`linear`, `jaxkern.linear`, `numpy`, [`linear`](../../bench/report.md#linear),\n"
        "[away](https://example.org/a#b), [here](#linear)\n"
        "```python\nf[0](x), `linear`\n```\n",
        here,
        places,
    )
    assert moved == (
        "# `linear`\n"
        "{py:obj}`linear <jaxkern.linear>`, {py:obj}`jaxkern.linear <jaxkern.linear>`, `numpy`, "
        "[`linear`](../bench/report.md#linear),\n"
        "[away](https://example.org/a#b), [here](#linear)\n"
        "```python\nf[0](x), `linear`\n```\n"
    )
    with pytest.raises(ValueError, match=r"norms\.md links to gone\.md, which is no page"):
        pages.on_site("[gone](gone.md)", here, places)


def test_every_page_is_in_a_table_of_contents():
    lines = (SITE / "index.md").read_text().splitlines()
    listed = {line for line in lines if re.fullmatch(r"[a-z_]+(?:/\w+)?", line)}
    built = {place.rpartition(".")[0] for place in pages.files().values() if "results" not in place}
    built = {page for page in built if not page.startswith(("bench/pictures", "CITATION"))}
    assert listed | {"index", ""} == built


def test_faults_of_a_site(tmp_path):
    """A page's links, anchors, pictures and scripts; and nothing from another host."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<h1 id="top">b</h1><a href="../a.html#x y">a</a>')
    (tmp_path / "s.css").write_text("p { background: url('https://cdn.example/p.png') }")
    (tmp_path / "a.html").write_text(
        '<link href="s.css"><a href="sub/b.html#top">1</a><a href="https://example.org">2</a>'
        '<a href="#gone">3</a><a href="sub/c.html">4</a><img src="gone.svg">'
        '<script src="//cdn.example/m.js"></script><img src="data:image/png;base64,AA=="/>'
    )
    assert list(pages.faults(tmp_path)) == [
        "a.html: #gone leads to no anchor",
        "a.html: sub/c.html leads to no file",
        "a.html: gone.svg leads to no file",
        "a.html: //cdn.example/m.js asks another host",
        "sub/b.html: ../a.html#x y leads to no anchor",
        "s.css: https://cdn.example/p.png asks another host",
    ]
    fine = '<p id="x">a</p><a href="#x">1</a><a href="">2</a><a href="a.html">3</a>'
    (tmp_path / "a.html").write_text(fine)
    (tmp_path / "s.css").unlink()
    (tmp_path / "sub" / "b.html").write_text('<a href="../a.html#x">a</a>')
    assert list(pages.faults(tmp_path)) == []
