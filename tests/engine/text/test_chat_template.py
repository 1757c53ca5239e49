"""The chat template: the given file, the model's own, or a line with the remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from pagemill.engine.errors import ConfigError, InvalidRequest, ModelLoadError, UnsupportedFeature
from pagemill.engine.llm import LLM
from pagemill.engine.text.tokenizer import load_tokenizer
from tests.engine.models.families.native_cases import write_llama

CHAT: Any = ({"role": "user", "content": "a b"},)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = write_llama(tmp_path / "model")
    words = {
        word: number for number, word in enumerate(["?", "a", "b", "user", "asks", "own", "named", "file"])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    configure(directory)
    return directory


def configure(directory: Path, **fields: Any) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | fields
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def tokens(directory: Path, chat_template: str | None = None) -> list[int]:
    tokenizer = load_tokenizer(directory, chat_template)
    assert tokenizer is not None
    return tokenizer.encode(tokenizer.render_chat(list(CHAT), (), {}), add_special_tokens=False)


def test_none_is_an_error_of_the_job(model: Path) -> None:
    with pytest.raises(UnsupportedFeature, match=r"no chat template: .*--chat-template FILE") as error:
        tokens(model)
    assert error.value.code == "unsupported_feature"


@pytest.mark.parametrize(
    "place",
    ["tokenizer_config.json", "chat_template.jinja", "chat_template.json", "named", "list in json"],
)
def test_beside_the_tokenizer(place: str, model: Path) -> None:
    template = "own {{ messages[0].content }}"
    rag = "named {{ messages[0].content }}"
    named = [{"name": "default", "template": template}, {"name": "rag", "template": rag}]
    if place == "tokenizer_config.json":
        configure(model, chat_template=template)
    elif place == "named":
        configure(model, chat_template=named)
    elif place == "chat_template.jinja":
        (model / place).write_text(template)
    else:
        content = template if place == "chat_template.json" else named
        (model / "chat_template.json").write_text(json.dumps({"chat_template": content}))
    assert tokens(model) == [5, 1, 2]
    if place in ("named", "list in json"):
        assert tokens(model, "rag") == [6, 1, 2]


def test_a_file_overrules_the_models_own(model: Path, tmp_path: Path) -> None:
    configure(model, chat_template="own")
    file = tmp_path / "mine.jinja"
    file.write_text("file {% for m in messages %}{{ m.role }} asks {{ m.content }}{% endfor %}")
    assert tokens(model, str(file)) == [7, 3, 4, 1, 2]
    llm = LLM(str(model), chat_template=str(file), num_threads=1, num_kv_blocks=64)
    (out,) = llm.chat([CHAT], use_tqdm=False)
    assert out.prompt_token_ids == [7, 3, 4, 1, 2]
    file.write_text("\ufeff" + file.read_text())
    assert tokens(model, str(file)) == [7, 3, 4, 1, 2], "a byte order mark is not part of it"
    plain = LLM(str(model), num_threads=1, num_kv_blocks=64)
    assert llm.engine.fingerprint != plain.engine.fingerprint, "its conversations have other tokens"


def test_several_without_a_default(model: Path) -> None:
    template = "named {{ messages[0].content }}"
    configure(model, chat_template=[{"name": n, "template": template} for n in ("rag", "tool_use")])
    with pytest.raises(Exception, match=r"several chat templates \(rag, tool_use\) and no default: .* NAME"):
        tokens(model)
    assert tokens(model, "tool_use") == [6, 1, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{% for %}", "line 1: "), (b"\xff\xfe", "can't read"), (b" \n", "should have 1 to"),
     (b"x" * (2**20 + 1), "should have 1 to")],
    ids=["syntax", "bytes", "empty", "long"],
)  # fmt: skip
def test_a_file_that_is_no_template(content: bytes, message: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_bytes(content)
    with pytest.raises(ConfigError, match=f"chat_template: .*{message}") as refused:
        tokens(model, str(tmp_path / "mine.jinja"))
    assert refused.value.setting == "chat_template"


def test_there_is_no_such_file_or_name(model: Path) -> None:
    with pytest.raises(ConfigError, match="chat_template: file '/no/such' does not exist"):
        LLM(str(model), chat_template="/no/such")
    configure(model, chat_template=[{"name": "rag", "template": "named"}])
    with pytest.raises(ConfigError, match="file 'chat' does not exist; the model's own are rag"):
        tokens(model, "chat")


def test_a_broken_one_of_the_models(model: Path) -> None:
    configure(model, chat_template="{{ own")
    with pytest.raises(ModelLoadError, match=r"can't read the chat template in .*chat_template"):
        tokens(model)


def test_the_templates_own_reason_is_told(model: Path) -> None:
    configure(model, chat_template="{{ raise_exception('roles must alternate' + ' !' * 1000) }}")
    with pytest.raises(InvalidRequest, match="rejects these messages: roles must alternate") as refused:
        tokens(model)
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize(
    "template",
    ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% for i in range(10**9) %}a{% endfor %}",
     "{{ messages.append(1) }}", "{{ cycler.__init__.__globals__.os.system('true') }}"],
    ids=["classes", "range", "changes", "globals"],
)  # fmt: skip
def test_runs_in_a_sandbox(template: str, model: Path) -> None:
    configure(model, chat_template=template)
    with pytest.raises(InvalidRequest, match="the chat template rejects these messages"):
        tokens(model)


LOOP = "{% for part in m.content %}{{ part.text }}{% endfor %}"
PARTS: dict[str, str] = {
    "loop": LOOP,
    "types": "{% for p in m.content %}{% if p.type == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}",
    "first": "{{ m.content[0].text }}",
    "selected": "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}",
    "text": "{{ m.content }}",
    "upper": "{{ m.content | trim }}",
    "either": "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}",
    "user alone": "{% if m.role == 'user' %}" + LOOP + "{% else %}{{ m.content }}{% endif %}",
    "all but user": "{% if m.role == 'user' %}{{ m.content }}{% else %}" + LOOP + "{% endif %}",
    "no system": "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}" + LOOP,
}


@pytest.mark.parametrize("written", PARTS.values(), ids=PARTS.keys())
def test_the_text_of_every_role_is_in_the_prompt(written: str, model: Path) -> None:
    configure(model, chat_template="{% for m in messages %} " + written + "{% endfor %}")
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    roles = ["user", "assistant", "user"] if "none" in written else ["system", "user", "assistant", "user"]
    chat = [{"role": role, "content": f"{role} number {n}"} for n, role in enumerate(roles)]
    text = " ".join(f"{role} number {n}" for n, role in enumerate(roles))
    assert tokenizer.render_chat(chat, [], {}).split() == text.split()


def test_a_template_without_the_users_text_is_an_error(model: Path) -> None:
    configure(model, chat_template="{% for m in messages %}{{ m.role }} {% endfor %}")
    with pytest.raises(InvalidRequest, match="leaves out the text of user messages"):
        tokens(model)


def test_a_template_that_refuses_the_trial_is_used_as_it_is(model: Path) -> None:
    configure(
        model,
        chat_template="{% if messages[0].role != 'system' or messages | length < 3 %}"
        "{{ raise_exception('system first') }}{% endif %}{{ messages[-1].content }}",
    )
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    chat = [{"role": role, "content": "a"} for role in ("system", "user", "user")]
    assert tokenizer.encode(tokenizer.render_chat(chat, (), {}), add_special_tokens=False) == [1]


def test_a_message_s_name_is_a_variable(model: Path) -> None:
    configure(model, chat_template="{% for m in messages %}{{ m.name }} {{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    chat = [{"role": "user", "name": "named", "content": "a"}, {"role": "user", "name": None, "content": "b"}]
    assert tokenizer.render_chat(chat, [], {}).split() == ["named", "a", "b"]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTINUED: dict[str, str] = {
    "ChatML": CHATML,
    "trimmed": CHATML.replace("m.content", "m.content | trim"),
    "parts": CHATML.replace("{{ m.content }}", LOOP),
    "thinking": CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
    "end of text": CHATML + "{{ eos_token }}",
}


@pytest.mark.parametrize("template", CONTINUED.values(), ids=CONTINUED.keys())
@pytest.mark.parametrize(
    "answer", ["The answer is", "The answer is ", "  x\n", "a pagemill7end b", "<think>y</think>x"]
)
def test_the_last_message_is_continued_as_by_transformers(template: str, answer: str, model: Path) -> None:
    configure(model, chat_template=template, eos_token="own")
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}]
    if template == CONTINUED["thinking"] and "</think>" in answer:
        with pytest.raises(InvalidRequest, match="leaves out the text of the last message"):
            tokenizer.render_chat(chat, [], {"continue_final_message": True})
        return
    found = tokenizer.render_chat(chat, [], {"continue_final_message": True})
    reference = AutoTokenizer.from_pretrained(model)
    turns: list[Any] = chat
    if template == CONTINUED["parts"]:
        turns = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in chat]
    assert found == reference.apply_chat_template(turns, tokenize=False, continue_final_message=True)
    assert tokenizer.render_chat(chat, [], {"continue_final_message": False}) == tokenizer.render_chat(
        chat, [], {}
    )


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ({"role": "user", "content": "a"}, "should be the assistant's"),
        ({"role": "assistant", "content": ""}, "with a text to continue"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "with a text to continue"),
    ],
)
def test_there_must_be_something_to_continue(last: dict[str, Any], message: str, model: Path) -> None:
    configure(model, chat_template=CHATML)
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    with pytest.raises(InvalidRequest, match=message):
        tokenizer.render_chat([*CHAT, last], [], {"continue_final_message": True})


def test_a_template_may_leave_out_what_should_be_continued(model: Path) -> None:
    configure(model, chat_template="{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None
    with pytest.raises(InvalidRequest, match="leaves out the text of the last message"):
        tokenizer.render_chat(
            [*CHAT, {"role": "assistant", "content": "x"}], [], {"continue_final_message": True}
        )
