"""Messages <-> token ids by the model's own chat template: the only user of the tokenizer on the rollout side.

Token in, token out: the next prompt is the previous prompt, the sampled ids, and the ids of only the text that the
template puts after them. Where the template renders the history in another way than before, the prompt is rendered
anew and the change is named (FORK).
"""

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_agent.errors import ModelFolderError
from megatron_agent.tools.formats import ToolFormat
from trajectory.steps import ContextChange

Message = dict[str, Any]

MAX_KNOWN_CHARACTERS = 32 << 20
"""Text of rendered conversations that is kept: the latest ones, of at least a few hundred episodes."""


class TemplateRenderer:
    """flows.base.ChatRenderer over a Hugging Face tokenizer."""

    def __init__(self, folder: str | Path, tool_format: ToolFormat) -> None:
        """Raises ModelFolderError where the folder's tokenizer has no chat template or no end-of-turn token."""
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._tool_format = tool_format
        if not self._tokenizer.chat_template:
            raise ModelFolderError(
                f"{folder}: the tokenizer has no chat template; use an instruct model, or add chat_template.jinja"
            )
        self._takes_tools = "tools" in self._tokenizer.chat_template
        self._end_of_turn = self._tokenizer.eos_token
        self._end_of_turn_id = self._tokenizer.eos_token_id
        if self._end_of_turn_id is None:
            raise ModelFolderError(f"{folder}: the tokenizer has no eos_token; set it to the end-of-turn token")
        self._end_ids = end_of_turn_ids(Path(folder)) | {self._end_of_turn_id}
        self._known: OrderedDict[tuple[Any, ...], tuple[str, list[int] | None]] = OrderedDict()
        self._known_characters = 0

    @property
    def end_of_turn_id(self) -> int:
        """The token that ends a turn."""
        return self._end_of_turn_id

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of the whole conversation up to where the assistant speaks."""
        key = _key(messages, tools)
        text, ids = self._prompt(messages, tools, key)
        if ids is None:
            ids = self._ids(text)
            self._keep(key, text, ids)
        return list(ids)

    def _prompt(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], key: tuple[Any, ...] | None
    ) -> tuple[str, list[int] | None]:
        """Text of the conversation up to where the assistant speaks, and its ids where they are known.

        Every text is asked for twice or more: a step's is the beginning of the next one's, and a group's first prompt
        is that of all its members.
        """
        if key is not None and (known := self._known.get(key)) is not None:
            self._known.move_to_end(key)
            return known
        text = self._text(messages, tools, generation_prompt=True)
        self._keep(key, text, None)
        return text, None

    def _keep(self, key: tuple[Any, ...] | None, text: str, ids: list[int] | None) -> None:
        if key is None:
            return
        if key not in self._known:
            self._known_characters += len(text)
        self._known[key] = (text, ids)
        while self._known_characters > MAX_KNOWN_CHARACTERS:
            _, (oldest, _) = self._known.popitem(last=False)
            self._known_characters -= len(oldest)

    def extend(
        self,
        prompt_ids: Sequence[int],
        response_ids: Sequence[int],
        before: Sequence[Message],
        after: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> tuple[list[int], ContextChange]:
        """The next prompt's ids, and whether it begins with prompt_ids + response_ids (CLEAN) or not (FORK).

        REALIGN: it does, but the model ended its turn with another token than the template's, which follows then.
        `after` begins with the assistant message that `response_ids` decoded to.
        """
        whole = [*before, *after]
        said = self._prompt(before, tools, _key(before, tools))[0] + after[0]["content"]
        following, _ = self._prompt(whole, tools, _key(whole, tools))
        if not following.startswith(said):
            return self._ids(following), ContextChange.FORK
        closing = following[len(said) :]
        change = ContextChange.CLEAN
        if response_ids and response_ids[-1] == self._end_of_turn_id:
            # The model closed its turn itself; the template's own end-of-turn token is that one.
            if not closing.startswith(self._end_of_turn):
                return self._ids(following), ContextChange.FORK
            closing = closing[len(self._end_of_turn) :]
        elif response_ids and response_ids[-1] in self._end_ids:
            change = ContextChange.REALIGN
        return [*prompt_ids, *response_ids, *self._ids(closing)], change

    def demonstration(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()
    ) -> tuple[list[int], list[bool]]:
        """Ids of a whole conversation, and True where an assistant turn (with its end-of-turn token) stands."""
        ids: list[int] = []
        mask: list[bool] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._text(messages[:number], tools, generation_prompt=True)
            if not prompt.startswith(done):
                raise ModelFolderError("the chat template rewrites earlier turns; give one demonstration per turn")
            given = self._ids(prompt[len(done) :])
            said = self._ids(message["content"] + self._end_of_turn)
            ids += given + said
            mask += [False] * len(given) + [True] * len(said)
            done = prompt + message["content"] + self._end_of_turn
        return ids, mask

    def encode_line(self, text: str) -> list[int]:
        """Ids of plain text and a line break behind it, without any template: a template may want a user's turn, or
        add a system prompt of its own."""
        return self._ids(text + "\n")

    def decode(self, response_ids: Sequence[int]) -> str:
        """Text of a response without the token that ended it."""
        ids = list(response_ids)
        if ids and ids[-1] in self._end_ids:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def _text(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation_prompt: bool) -> str:
        options: dict[str, Any] = {}
        if tools and self._takes_tools:
            options["tools"] = list(tools)
        elif tools:
            messages = self._tool_format.with_tools(messages, tools)
        return self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt, **options
        )

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]


def _key(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[Any, ...] | None:
    """What the rendered text depends on, by value; None where a message has more than role and text."""
    parts: list[Any] = [json.dumps(tools) if tools else ""]
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if len(message) != 2 or not isinstance(role, str) or not isinstance(content, str):
            return None
        parts += (role, content)
    return tuple(parts)


def end_of_turn_ids(folder: Path) -> set[int]:
    """All ids at which the engine stops, from generation_config.json or config.json: some models have several."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.exists() and (ids := json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")) is not None:
            return set(ids) if isinstance(ids, list) else {ids}
    return set()
