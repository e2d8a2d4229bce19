"""Messages and token ids: the sampled ids stay, the rest equals what the template renders."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_model import END, TOKENIZER, ids_of, text_of

import rollout.chat_renderer
from megatron_agent.errors import ModelFolderError
from megatron_agent.model_folders.tiny_qwen3 import CHAT_TEMPLATE, build
from megatron_agent.tools.calculator import Calculator
from megatron_agent.tools.formats import HermesFormat
from rollout.chat_renderer import TemplateRenderer
from trajectory.samples import merge_steps
from trajectory.steps import ContextChange, Step, Trajectory

CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
STRIPS_THINKING = (
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and not loop.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TRIMS = CHATML.replace("m.content +", "m.content | trim +")
NO_NEWLINE = CHATML.replace("<|im_end|>\\n", "<|im_end|>")

USER = {"role": "user", "content": "go"}
AGAIN = {"role": "user", "content": "at b1"}


def assistant(content):
    return {"role": "assistant", "content": content}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build(path)
    return path


@pytest.fixture
def renderer(folder, tmp_path):
    """Makes a renderer with another chat template."""

    def make(template: str = CHAT_TEMPLATE, **generation_config) -> TemplateRenderer:
        copy = shutil.copytree(folder, tmp_path / "model", dirs_exist_ok=True)
        (copy / "chat_template.jinja").write_text(template)
        if generation_config:
            (copy / "generation_config.json").write_text(json.dumps(generation_config))
        return TemplateRenderer(copy, HermesFormat())

    return make


def whole(messages, **options) -> list[int]:
    """Ids of the whole conversation by the template alone."""
    options = {"add_generation_prompt": True, "return_dict": False, **options}
    ids: Any = TOKENIZER.apply_chat_template(messages, **options)
    return ids


def test_render_is_the_templates(renderer):
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert renderer().render(messages, []) == whole(messages)
    assert renderer().end_of_turn_id == TOKENIZER.eos_token_id


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHATML, NO_NEWLINE])
def test_ids_of_a_long_conversation_equal_the_templates(renderer, template):
    chat = renderer(template)
    history = [USER]
    prompt = chat.render(history)
    for reply in ("left", "I go up, to b3: ünïcode 12", "", "<tool_call>{}</tool_call>"):
        following = [assistant(reply), AGAIN]
        prompt, change = chat.extend(prompt, ids_of(reply + END), history, following)
        history += following
        assert change is ContextChange.CLEAN
        assert prompt == chat.render(history)


def test_the_newline_after_the_turn_is_not_trained(renderer):
    chat = renderer()
    first, response = chat.render([USER]), ids_of("left" + END)
    second, _ = chat.extend(first, response, [USER], [assistant("left"), AGAIN])
    (sample,) = merge_steps(
        Trajectory(trajectory_id="t", group_id="g", steps=(step(first, response), step(second, ids_of("up" + END)))),
        trajectory_index=0,
    )
    after_turn = len(first) + len(response)
    assert sample.token_ids[after_turn] == ids_of("\n")[0]
    assert not sample.loss_mask[after_turn]
    assert sample.token_ids[sample.loss_mask].tolist() == ids_of("left" + END) + ids_of("up" + END)


def step(prompt, response, change=ContextChange.CLEAN) -> Step:
    return Step(
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        rollout_logprobs=np.full(len(response), -0.5, dtype=np.float32),
        response_mask=np.ones(len(response), dtype=bool),
        policy_version=0,
        context_change=change,
    )


def test_sampled_ids_stay_even_where_the_text_would_be_tokenized_otherwise(renderer):
    """`b3` is one token, but a model may spell it in two."""
    chat = renderer()
    spelled = [*ids_of("b"), *ids_of("3"), TOKENIZER.eos_token_id]
    assert chat.decode(spelled) == "b3"
    assert len(ids_of("b3")) == 1
    prompt = chat.render([USER])
    following, change = chat.extend(prompt, spelled, [USER], [assistant("b3"), AGAIN])
    assert change is ContextChange.CLEAN
    assert following[: len(prompt) + 3] == prompt + spelled


def test_a_response_cut_by_length_is_closed_by_the_template(renderer):
    chat = renderer()
    prompt, response = chat.render([USER]), ids_of("left le")
    following, change = chat.extend(prompt, response, [USER], [assistant("left le"), AGAIN])
    assert change is ContextChange.CLEAN
    assert following == chat.render([USER, assistant("left le"), AGAIN])
    assert following[len(prompt) + len(response)] == TOKENIZER.eos_token_id


def test_a_response_cut_within_a_character_stays(renderer):
    chat = renderer()
    response = ids_of("ü")[:1]
    text = chat.decode(response)
    prompt = chat.render([USER])
    following, change = chat.extend(prompt, response, [USER], [assistant(text), AGAIN])
    assert change is ContextChange.CLEAN
    assert following[: len(prompt) + 1] == prompt + response


def test_an_empty_response(renderer):
    chat = renderer()
    prompt = chat.render([USER])
    assert chat.extend(prompt, [], [USER], [assistant(""), AGAIN])[0] == chat.render([USER, assistant(""), AGAIN])
    assert chat.decode([]) == chat.decode([TOKENIZER.eos_token_id]) == ""


def test_a_template_that_removes_earlier_thinking_forks(renderer):
    chat = renderer(STRIPS_THINKING)
    reply = "<think>hmm</think>\n\nleft"
    history, prompt = [USER], chat.render([USER])
    steps = [step(prompt, ids_of(reply + END), ContextChange.FIRST)]
    for _ in range(2):
        following = [assistant(reply), AGAIN]
        prompt, change = chat.extend(prompt, ids_of(reply + END), history, following)
        history = history + following
        assert change is ContextChange.FORK
        assert "<think>" not in text_of(prompt)
        assert prompt == chat.render(history)
        steps.append(step(prompt, ids_of(reply + END), change))
    samples = merge_steps(Trajectory(trajectory_id="t", group_id="g", steps=tuple(steps)), trajectory_index=0)
    assert len(samples) == 3
    for number, sample in enumerate(samples):
        trained = sample.token_ids[sample.loss_mask]
        assert text_of(trained) == reply + END
        assert set(sample.step_index[sample.loss_mask]) == {number}
        assert sample.loss_mask[-len(trained) :].all()  # the re-rendered turns before it are not


def test_the_same_template_without_thinking_does_not_fork(renderer):
    chat = renderer(STRIPS_THINKING)
    _, change = chat.extend(chat.render([USER]), ids_of("left" + END), [USER], [assistant("left"), AGAIN])
    assert change is ContextChange.CLEAN


def test_a_template_that_trims_forks_only_where_there_is_something_to_trim(renderer):
    chat = renderer(TRIMS)
    prompt = chat.render([USER])
    assert chat.extend(prompt, ids_of("left" + END), [USER], [assistant("left"), AGAIN])[1] is ContextChange.CLEAN
    following, change = chat.extend(prompt, ids_of(" left\n" + END), [USER], [assistant(" left\n"), AGAIN])
    assert change is ContextChange.FORK
    assert following == chat.render([USER, assistant("left"), AGAIN])


def test_a_turn_that_ended_with_another_end_token(renderer):
    """Several models stop at `<|endoftext|>` too: it stays, trained; the template's own one follows, untrained."""
    other = TOKENIZER.pad_token_id
    chat = renderer(eos_token_id=[TOKENIZER.eos_token_id, other])
    prompt, response = chat.render([USER]), [*ids_of("left"), other]
    assert chat.decode(response) == "left"
    following, change = chat.extend(prompt, response, [USER], [assistant("left"), AGAIN])
    assert change is ContextChange.REALIGN
    rest = chat.render([USER, assistant("left"), AGAIN])[len(prompt) + 1 :]
    assert following == prompt + response + rest
    samples = merge_steps(
        Trajectory(
            trajectory_id="t",
            group_id="g",
            steps=(step(prompt, response), step(following, ids_of("up" + END), change)),
        ),
        trajectory_index=0,
    )
    assert len(samples) == 1


def test_tools_are_rendered_by_a_template_that_takes_them(renderer):
    chat = renderer()
    tools = [Calculator().schema()]
    prompt = chat.render([USER], tools)
    assert prompt == whole([USER], tools=tools)
    assert '"name": "calculator"' in text_of(prompt)
    messages = [assistant("<tool_call>{}</tool_call>"), {"role": "tool", "content": "42"}]
    following, change = chat.extend(prompt, ids_of(messages[0]["content"] + END), [USER], messages, tools)
    assert change is ContextChange.CLEAN
    assert following == chat.render([USER, *messages], tools)


def test_tools_go_into_a_system_message_where_the_template_takes_none(renderer):
    chat = renderer(CHATML)
    tools = [Calculator().schema()]
    prompt = chat.render([USER], tools)
    text = text_of(prompt)
    assert text.startswith("<|im_start|>system\nYou can call tools:\n")
    assert '"name": "calculator"' in text
    following, change = chat.extend(prompt, ids_of("left" + END), [USER], [assistant("left"), AGAIN], tools)
    assert change is ContextChange.CLEAN
    assert following == chat.render([USER, assistant("left"), AGAIN], tools)


def test_demonstrations_train_the_assistants_turns(renderer):
    chat = renderer()
    messages = [USER, assistant("left"), AGAIN, assistant("up")]
    ids, mask = chat.demonstration(messages)
    assert text_of(np.array(ids)[np.array(mask)]) == f"left{END}up{END}"
    assert [*ids, *ids_of("\n")] == whole(messages, add_generation_prompt=False)


def test_a_demonstration_whose_history_is_rewritten_is_refused(renderer):
    messages = [USER, assistant("<think>a</think>left"), AGAIN, assistant("up")]
    with pytest.raises(ModelFolderError, match="one demonstration per turn"):
        renderer(STRIPS_THINKING).demonstration(messages)


def test_a_tokenizer_without_template_is_refused(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "model")
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ModelFolderError, match="the tokenizer has no chat template"):
        TemplateRenderer(copy, HermesFormat())


def test_what_was_rendered_before_is_used_only_where_nothing_changed(renderer):
    chat = renderer()
    message = {"role": "user", "content": "go"}
    before = chat.render([message])
    before.append(-1)  # a caller may change what it got
    assert chat.render([message]) == whole([message])
    message["content"] = "stay"
    assert chat.render([message]) == whole([message])
    assert chat.render([{"role": "system", "content": "stay"}]) == whole([{"role": "system", "content": "stay"}])
    schema = Calculator().schema()
    with_tools = chat.render([USER], [schema])
    assert with_tools != chat.render([USER])
    assert with_tools == chat.render([USER], [dict(schema)])
    assert chat.render([USER], [schema | {"more": 1}]) != with_tools


def test_only_the_latest_conversations_are_kept(renderer, monkeypatch):
    monkeypatch.setattr(rollout.chat_renderer, "MAX_KNOWN_CHARACTERS", 2000)
    chat = renderer()
    for number in range(100):
        chat.render([{"role": "user", "content": f"go {number}"}])
    assert sum(len(text) for text, _ in chat._known.values()) == chat._known_characters <= 2000
    assert chat.render([{"role": "user", "content": "go 0"}]) == whole([{"role": "user", "content": "go 0"}])
