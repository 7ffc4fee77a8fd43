"""Cases of public reports, each the shortest that once went wrong."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import lopti  # isort: skip
import rewards

FLAGS = "--prompts-per-step 1 --group-size 2 --max-new-tokens 4 --eval-size 1 --eval-samples 0 "
FLAGS += "--steps 1 --people 2 "


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('--data "my data/x.jsonl"  # mine', ["--data", "my data/x.jsonl"]),
        ("--data 'my #1.jsonl'", ["--data", "my #1.jsonl"]),
        (r"--data C:\data\x.jsonl", ["--data", r"C:\data\x.jsonl"]),
        ("# the paper's", []),
    ],
)
def test_a_line_of_a_file_of_flags(line, words):
    assert lopti.words_of_line(line) == words


def test_a_quote_that_does_not_end_is_told(tmp_path, capsys):
    (tmp_path / "my.flags").write_text('--data "my data')
    assert lopti.main([f"@{tmp_path}/my.flags"]) == 2
    assert '--data "my data of a file of flags' in capsys.readouterr().err


def no_space(self, path, **options):
    raise OSError(28, "No space left on device")


def test_a_full_disk_without_a_checkpoint_is_no_advice_to_resume(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(transformers.PreTrainedModel, "save_pretrained", no_space)
    flags = FLAGS + f"--save-every 0 --name full --output {tmp_path}"
    assert lopti.main(flags.split()) == 2
    told = capsys.readouterr().err
    assert "there is no checkpoint: start again" in told
    assert "--resume" not in told


def test_a_place_that_has_moved_goes_into_the_config(tmp_path):
    settings = lopti.Settings(model="old/model", resume=str(tmp_path))
    saved = {**lopti.asdict(settings), "resume": "", "people": [2, 3]}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    lopti.refuse_changes(settings)
    for changed, is_place in (
        (lopti.replace(settings, model="new"), True),
        (lopti.replace(settings, alpha=0.5), False),
    ):
        with pytest.raises(lopti.UserError, match="cannot change") as error:
            lopti.refuse_changes(changed)
        assert ("has moved into" in str(error.value)) == is_place


def test_out_of_memory_names_the_reference_model(capsys):
    """Which no smaller batch makes smaller."""

    def fails():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert lopti.exit_code(fails, "lopti.py") == 2
    assert "--kl-coef 0" in capsys.readouterr().err


def column(completions, **columns):
    return torch.ones(len(completions), 2).numpy()


def one_that_divides_by_zero(completions, **columns):
    return [1 / 0 for _ in completions]


@pytest.mark.parametrize("function", [column, one_that_divides_by_zero])
def test_the_line_of_a_reward_that_fails_is_its_own(function):
    """Where our code fails with what it returned, no line is named."""
    settings = lopti.Settings(
        task="math", reward=f"{__name__}:{function.__name__}", solved_reward=1
    )
    row = {"columns": {}, "solution": "1", "prompt": "?"}
    with pytest.raises(lopti.UserError) as error:
        rewards.compute_rewards(["a", "b"], [row, row], settings)
    told = str(error.value)
    assert "rewards.py" not in told
    if function is one_that_divides_by_zero:
        assert re.search(r"in \S+test_cases.py, line \d+", told)


def test_an_answer_keeps_its_spaces():
    """Some tokenizers make "a!" of "a !"."""
    words = Tokenizer(models.WordLevel({"a": 0, "!": 1, "<end>": 2}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        clean_up_tokenization_spaces=True,
        eos_token="<end>",
        pad_token="<end>",
    )

    def answer(model, prompts, *others):
        return [[0, 1, 2] for _ in prompts]

    model, _ = lopti.load_model("", "cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lopti, "generate_in_stretches", answer)
        rollout = lopti.sample(model, tokenizer, ["a"], 1, 1.0, lopti.Settings(), [2])
    assert rollout.texts == ["a !"]
