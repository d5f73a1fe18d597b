"""Where the texts of a model end: before stop texts; and how fast they were decoded."""

import dataclasses
import random
import re

import pytest

from jaxkern.lm import cli, hf, loader, sample
from jaxkern.lm.config import PRESETS
from tests.language_models import random_params


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(PRESETS["micro"].model, n_layers=1)
    return loader.LanguageModel(config, random_params(config), 0)


def before(text, stops):
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(ends)[1]] if ends else text


@pytest.mark.parametrize("stops", [["ab"], ["aab", "b"], ["abab", "ba"], ["c"], ["aaaa", "aab"]])
def test_a_text_ends_before_the_first_stop_however_it_comes(stops):
    generator = random.Random(0)
    for _ in range(200):
        text = "".join(generator.choices("ab", k=generator.randint(0, 12)))
        ending, shown, at, ended = sample._Ending(stops), "", 0, False
        while not ended and at < len(text):
            size = generator.randint(1, 4)
            piece, ended = ending(text[at : at + size], False)
            shown, at = shown + piece, at + size
        if not ended:
            shown += ending("", True)[0]
        assert shown == before(text, stops)
        assert ended == (shown != text)


def test_texts_of_several_prompts_end_each_by_itself(model):
    """The prompts are of unequal lengths; a stop text may lie across two chunks."""
    prompts = ["a", "a longer prompt", "of 17 bytes or so"]
    whole = model.generate(prompts, length=40, seed=3)
    assert len(set(whole)) == 3
    for stops in ([whole[0][14:18]], [whole[1][3:5], whole[2][30:33]], ["not there at all"]):
        assert model.generate(prompts, length=40, seed=3, stop=stops) == [
            before(text, stops) for text in whole
        ]
        pieces = model.stream(prompts[1], length=40, seed=4, stop=stops)
        assert "".join(pieces) == before(whole[1], stops)


def test_decoding_ends_when_all_texts_have_ended(model):
    first = model.generate("a", length=4, seed=3)
    timing = sample.Timing()
    options = {"length": 4000, "seed": 3, "stop": [first[1:3]], "timing": timing}
    assert model.generate("a", **options) == first[:1]
    assert re.fullmatch(r"the first 16 tokens after .* s, compilation included", str(timing))


def test_wrong_stops_are_refused(model):
    for stop, error in (("a", TypeError), ([1], TypeError), ([""], ValueError)):
        with pytest.raises(error, match=r"stop (must be a sequence of texts|has an empty text)"):
            model.generate("a", stop=stop)


def test_the_command_line_stops_and_times(tmp_path, capsys, model):
    hf.save(tmp_path, model.config, model.params)
    argv = ["sample", "--hf", str(tmp_path), "--prompt", "a", "--length", "40"]
    assert cli.main([*argv, "--timing"]) == 0
    printed, told = capsys.readouterr()
    assert re.fullmatch(
        r"jaxkern: the first 16 tokens after \d+\.\d\d s, compilation included; "
        r"then 24 at [\d,]+ tokens/s\n",
        told,
    )
    stops = printed[2:4], printed[20:23]
    assert cli.main([*argv, "--stop", stops[0], "--stop", stops[1]]) == 0
    assert capsys.readouterr() == ("a" + before(printed[1:-1], stops) + "\n", "")
    with pytest.raises(SystemExit, match="2"):
        cli.main([*argv, "--stop", ""])
    assert "argument --stop: must be a text, got ''" in capsys.readouterr().err
    assert str(sample.Timing()) == "no token was decoded"
