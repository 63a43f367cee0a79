"""Chats as the templates of real models write them: their texts, and where their answers stand."""

import json
import warnings

import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headprune.config import DataConfig
from headprune.config.data import Loss
from headprune.data.read import read_examples
from headprune.data.sequences import answer_rows, tokenized_rows, windows
from headprune.errors import DataError, HeadpruneWarning
from tests import tiny

SIGNS = (
    *("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<|user|>", "<|assistant|>"),
    *("<|end|>", "<|endoftext|>", "<think>", "</think>"),
)
CHATML = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate user/assistant/user/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
)
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}"
    "{% else %}<|endoftext|>{% endif %}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '<|user|>' + m.content }}"
    "{% else %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
QWEN3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in m.content else '' %}{{ '<|im_start|>assistant\n' }}"
    "{% if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ said + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['content'] is string %}"
    "{{ m['content'] }}{% elif m['content'] %}{% for p in m['content'] %}{{ p['text'] }}"
    "{% endfor %}{% endif %}{% for c in m['tool_calls'] or [] %}<call>{{ c['function']['name'] }}"
    "</call>{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


def parts(text):
    return [{"type": "text", "text": text}]


# "a" stands in "assistant", and "s" twice
TWO = [user("What is an answer?"), answer("a"), user("And s?"), answer("s, é and 日")]
PLAIN = ["a{}", "s, é and 日{}"]
THOUGHT = [user("One?"), answer("<think>\nw\n</think>\n\na"), user("Two?"), answer("t")]
LAST = [user("One?"), answer("a"), user("Two?"), answer("<think>\nwhy\n</think>\n\nt")]
CALL = [{"type": "function", "id": "1", "function": {"name": "clock", "arguments": {}}}]
ASKED = [user("Time?"), answer(None, tool_calls=CALL), {"role": "tool", "content": "9"}]
IM, EOS = "<|im_end|>", "</s>"
# template, chat, what counts: the tokens that a model writes itself
CASES = {
    "chatml": (CHATML, TWO, [one.format(IM) for one in PLAIN]),
    "chatml that never asks": (CHATML.split("{% if add")[0], TWO, [x.format(IM) for x in PLAIN]),
    "llama 3": (LLAMA3, TWO, [one.format("<|eot_id|>") for one in PLAIN]),
    "llama 3, white space": (
        LLAMA3,
        [user(" q "), answer(" a\n"), user("r"), answer("\nb")],
        ["a<|eot_id|>", "b<|eot_id|>"],
    ),
    "gemma": (GEMMA, TWO, [one.format("<end_of_turn>") for one in PLAIN]),
    "mistral": (MISTRAL, TWO, [one.format(EOS) for one in PLAIN]),
    "zephyr": (ZEPHYR, TWO, [one.format(EOS) for one in PLAIN]),
    "phi 3": (PHI3, TWO, [one.format("<|end|>") for one in PLAIN]),
    "deepseek": (DEEPSEEK, THOUGHT, ["\n\na</s>", "t</s>"]),
    "qwen 3": (QWEN3, TWO, [PLAIN[0].format(IM), "<think>\n\n</think>\n\n" + PLAIN[1].format(IM)]),
    "qwen 3, thought before": (QWEN3, THOUGHT, [f"a{IM}", f"<think>\n\n</think>\n\nt{IM}"]),
    "qwen 3, thought last": (QWEN3, LAST, [f"a{IM}", f"<think>\nwhy\n</think>\n\nt{IM}"]),
    "marked": (MARKED, TWO, [one.format(IM) for one in PLAIN]),
    "upper case": (CHATML.replace("m.content", "m.content | upper"), TWO[:2], ["A<|im_end|>"]),
    "parts": (CALLS, [user(parts("q")), answer(parts("yes"))], [f"yes{IM}"]),
    "a call": (CALLS, [*ASKED, answer("nine")], [f"<call>clock</call>{IM}", f"nine{IM}"]),
    "an empty answer": (CHATML, [user("Say nothing."), answer("")], [IM]),
    "the last token": (MISTRAL.replace(" + eos_token", ""), TWO[:2], ["a"]),
}


def tokenizer_of(template):
    vocabulary = [*tiny.SPECIAL, *SIGNS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    built = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(vocabulary)}, merges=[]))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    names = dict(zip(("unk", "pad", "bos", "eos", "mask"), tiny.SPECIAL, strict=True))
    tokens = {f"{name}_token": token for name, token in names.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=built, additional_special_tokens=list(SIGNS), **tokens
    )
    tokenizer.chat_template = template
    return tokenizer


def rows_of(chats, file, column="messages"):
    file.write_text("".join(json.dumps({column: chat}) + "\n" for chat in chats))
    return DataConfig(source=str(file), loss=Loss.ANSWERS)


@pytest.mark.parametrize("case", CASES)
def test_answers_count_as_the_template_writes_them(case, tmp_path):
    template, chat, wanted = CASES[case]
    of = tokenizer_of(template)
    data = rows_of([chat, chat], tmp_path / "chats.jsonl")
    ids = of.apply_chat_template(chat, return_dict=True)["input_ids"]
    (row, again) = answer_rows(read_examples(data, of), of, 400)
    assert row == again
    assert row["input_ids"] == ids
    counted = [token for token in row["labels"] if token != -100]
    assert of.decode(counted) == "".join(wanted)
    assert [a for a, b in zip(ids, row["labels"], strict=True) if b != -100] == counted
    rest = of.decode([a for a, b in zip(ids, row["labels"], strict=True) if b == -100])
    assert all(message["content"] in rest for message in chat if message["role"] == "tool")
    whole = read_examples(data.model_copy(update={"loss": Loss.ALL}), of).texts[0]
    assert whole == (of.apply_chat_template(chat, tokenize=False),)


def test_marks_of_a_template_are_those_of_transformers(tmp_path):
    of, chat = tokenizer_of(MARKED), [user("Which?"), answer("this one"), user("And?"), answer("b")]
    data = rows_of([chat], tmp_path / "chats.jsonl")
    given = of.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    (row,) = answer_rows(read_examples(data, of), of, 400)
    assert [int(label != -100) for label in row["labels"]] == given["assistant_masks"]
    assert sum(given["assistant_masks"]) == len("this one") + len("b") + 2


SAID = {
    "human": ([user("robot or human?"), answer("human")], TWO),
    "gpt": ([user("which?"), answer("gpt")], TWO),
    "empty": ([{"role": "system", "content": ""}, user("hi"), answer("")], TWO),
    "parts": ([user(parts("hi")), answer(parts("yes"))], [user(parts("a")), answer(parts("b"))]),
    "parts and strings": ([user(parts("hi")), answer("yes")], TWO),
    "further keys": ([user("hi", name="bob"), answer("yes", weight=1)], TWO),
    "a call": ([*ASKED, answer("noon")], TWO),
    "a call by id": ([*ASKED[:2], {**ASKED[2], "tool_call_id": "1"}], [*ASKED, answer("b")]),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "json in csv", "json in parquet"])
@pytest.mark.parametrize("case", SAID)
def test_a_chat_passes_as_it_stands(case, kind, tmp_path):
    of, chats, file = tokenizer_of(CALLS), SAID[case], tmp_path / f"chats.{kind.split()[-1]}"
    if kind == "jsonl":
        rows_of(list(chats), file)
    elif "json" in kind:
        rows = Dataset.from_dict(
            {"messages": [f"\n{json.dumps(chat, indent=2)}" for chat in chats]}
        )
        rows.to_csv(file, index=False) if "csv" in kind else rows.to_parquet(file)
    else:
        rows = [{"messages": chat, "source": "a"} for chat in chats]
        Dataset.from_list(rows, on_mixed_types="use_json").to_parquet(file)
    texts = list(read_examples(DataConfig(source=str(file)), of).texts)
    assert texts == [(of.apply_chat_template(chat, tokenize=False),) for chat in chats]


def test_a_prompt_with_a_reference_asks_for_its_answer(tmp_path):
    of, file = tokenizer_of(CHATML), tmp_path / "pairs.jsonl"
    chats = [TWO[:1], TWO]  # the second has its answer
    rows = [{"messages": chat, "reference": "a"} for chat in chats]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=str(file), text_column="messages,reference")
    how = ({"add_generation_prompt": True}, {})
    wanted = [
        of.apply_chat_template(c, tokenize=False, **h) for c, h in zip(chats, how, strict=True)
    ]
    assert list(read_examples(data, of).texts) == [(text, "a") for text in wanted]
    assert wanted[0].endswith("<|im_start|>assistant\n")


def test_names_of_sharegpt_are_roles_alone(tmp_path):
    of = tokenizer_of(CHATML)
    given = [{"from": "human", "value": "human"}, {"from": "gpt", "value": "gpt", "weight": 1}]
    data = rows_of([given] * 2, tmp_path / "chats.jsonl", "conversations")
    text = of.apply_chat_template([user("human"), answer("gpt")], tokenize=False)
    assert read_examples(data, of).texts[0] == (text,)
    (row, _) = answer_rows(read_examples(data, of), of, 400)
    assert of.decode([one for one in row["labels"] if one != -100]) == f"gpt{IM}"


TOOLS = [
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "day", "parameters": {"type": "object"}}},
]
WITH_TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be kind."}
BESIDE = {
    "tools": ({"tools": TOOLS}, [], TOOLS),
    "tools as json": ({"tools": json.dumps(TOOLS)}, [], TOOLS),
    "system": ({"system": "Be kind."}, [SYSTEM], None),
    "both": ({"system": "Be kind.", "tools": TOOLS}, [SYSTEM], TOOLS),
    "neither": ({"system": None, "tools": []}, [], None),
    "an empty system": ({"system": "", "tools": None}, [], None),
}


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("template", [CHATML, MARKED, LLAMA3])
@pytest.mark.parametrize("case", BESIDE)
def test_tools_and_a_system_message_beside_a_chat(case, template, kind, tmp_path):
    beside, before, tools = BESIDE[case]
    of, file = tokenizer_of(WITH_TOOLS + template), tmp_path / f"chats.{kind}"
    rows = [{"messages": chat, **beside} for chat in (TWO, [{**SYSTEM, "content": "x"}, *TWO])]
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        Dataset.from_list(rows).to_parquet(file)
    data = DataConfig(source=str(file), loss=Loss.ANSWERS)
    chats = [[*before, *TWO], rows[1]["messages"]]  # a system message of its own stays alone
    wanted = [of.apply_chat_template(chat, tools=tools, tokenize=False) for chat in chats]
    examples = read_examples(data, of)
    assert list(examples.texts) == [(text,) for text in wanted]
    bare = of.apply_chat_template(TWO, tokenize=False)
    assert (wanted[0] != bare) == bool(before or tools)
    for row in answer_rows(examples, of, 900):
        ended = "<|eot_id|>" if template == LLAMA3 else IM
        assert of.decode([x for x in row["labels"] if x != -100]) == f"a{ended}s, é and 日{ended}"


def test_tools_that_are_no_json_are_refused(tmp_path):
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": TWO, "tools": "clock"}) + "\n")
    with pytest.raises(DataError, match=r"chats.jsonl': the chat template takes no such"):
        read_examples(DataConfig(source=str(file)), tokenizer_of(CHATML))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("case", [name for name in CASES if len(CASES[name][2]) == 2])
def test_an_answer_of_weight_0_does_not_count(case, kind, tmp_path):
    template, chat, wanted = CASES[case]
    of, file = tokenizer_of(template), tmp_path / f"chats.{kind}"
    numbers = [n for n, message in enumerate(chat) if message["role"] == "assistant"]

    def counted(*weights):
        of_message = dict(zip(numbers, weights, strict=True))
        told = [
            {**m, "weight": of_message[n]} if n in of_message else m for n, m in enumerate(chat)
        ]
        table = Dataset.from_list([{"messages": told}], on_mixed_types="use_json")
        table.to_json(file) if kind == "jsonl" else table.to_parquet(file)
        data = DataConfig(source=str(file), loss=Loss.ANSWERS)
        (row,) = answer_rows(read_examples(data, of), of, 400)
        return str(of.decode([one for one in row["labels"] if one != -100]))

    assert counted(1, 1) == "".join(wanted)
    assert [counted(0, 1), counted(1, 0)] == [wanted[1], wanted[0]]
    with pytest.raises(DataError, match="without an answer of the assistant that counts"):
        counted(0, 0)


DATES = [user("2024-01-01"), answer("2024-01-02")]


@pytest.mark.parametrize("more", [[{}, {}], [{"x": 1}, {"x": "a"}], [{}, {"y": "2024-01-03"}]])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_message_that_is_a_date_stays_as_it_is(kind, more, tmp_path):
    of, file = tokenizer_of(CHATML), tmp_path / f"chats.{kind}"
    chat = [{**a, **b} for a, b in zip(DATES, more, strict=True)]

    def read(chats):
        rows_of(chats, file)
        if kind == "json":
            file.write_text(json.dumps([{"messages": chat} for chat in chats]))
        return list(read_examples(DataConfig(source=str(file)), of).texts)

    wanted = (of.apply_chat_template(chat, tokenize=False),)
    assert read([chat, chat]) == [wanted] * 2
    changed = [user("2024-01-01T00:00:00"), chat[1]]
    assert read([changed]) == [(of.apply_chat_template(changed, tokenize=False),)] != [wanted]


@pytest.mark.parametrize("names", [("prompt", "completion"), ("chosen", "rejected")])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_one_of_several_columns_of_chats_is_named(kind, names, tmp_path):
    of, file, chats = tokenizer_of(CHATML), tmp_path / f"chats.{kind}", (TWO[:2], TWO[2:])
    table = Dataset.from_list([dict(zip(names, chats, strict=True))] * 2)
    table.to_json(file) if kind == "jsonl" else table.to_parquet(file)
    with pytest.raises(DataError, match=f"columns {', '.join(names)}: name .* --text-column"):
        read_examples(DataConfig(source=str(file)), of)
    for name, chat in zip(names, chats, strict=True):
        read = read_examples(DataConfig(source=str(file), text_column=name), of)
        assert list(read.texts) == [(of.apply_chat_template(chat, tokenize=False),)] * 2


REFUSED = {
    "a role": (GEMMA, [{"role": "system", "content": "x"}, *TWO], "System role not supported"),
    "an order": (MISTRAL, TWO[1:], "Roles must alternate"),
    "no answer": (CHATML, TWO[:1], "a chat without an answer"),
    "twice": (CHATML.replace("+ m.content", "+ m.content + m.content"), TWO, "in several places"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_chat_that_a_template_refuses_is_named(case, tmp_path):
    template, chat, message = REFUSED[case]
    of, data = tokenizer_of(template), rows_of([chat, TWO], tmp_path / "chats.jsonl")
    with pytest.raises(DataError, match=message) as caught:
        answer_rows(read_examples(data, of), of, 400)
    assert "chats.jsonl" in str(caught.value)


def test_the_chat_that_a_template_refuses_is_quoted(tmp_path):
    of, odd = tokenizer_of(MISTRAL), [answer("I come first, wrongly"), user("q")]
    data = rows_of([TWO, odd, TWO], tmp_path / "chats.jsonl")
    with pytest.raises(DataError, match="Roles must alternate.*I come first, wrongly"):
        list(read_examples(data, of).texts)


def test_a_chat_without_messages_is_left_out(tmp_path):
    of = tokenizer_of(CHATML)
    with pytest.warns(HeadpruneWarning, match="1 of 3 rows have no text in messages"):
        examples = read_examples(rows_of([TWO, [], TWO], tmp_path / "chats.jsonl"), of)
    assert list(examples.texts) == [(of.apply_chat_template(TWO, tokenize=False),)] * 2


def test_answers_that_are_cut_off_are_counted(tmp_path):
    of, long = tokenizer_of(ZEPHYR), [user("q" * 90), answer("late")]
    data = rows_of([[user("q"), answer("soon")], long, long], tmp_path / "chats.jsonl")
    with pytest.warns(HeadpruneWarning, match="2 of 3 chats are cut off at 60 tokens"):
        rows = answer_rows(read_examples(data, of), of, 60)
    assert len(rows) == 1
    with warnings.catch_warnings():
        assert len(answer_rows(read_examples(data, of), of, 200)) == 3
    with pytest.raises(DataError, match=r"No answer of 3 chats begins within 3 tokens\."):
        answer_rows(read_examples(data, of), of, 3)


@pytest.mark.parametrize("template", [LLAMA3, GEMMA, MISTRAL])
def test_chats_begin_once_and_end_once(template, tmp_path):
    of = tokenizer_of(template)
    of.add_bos_token = True
    bos, eos = of.bos_token_id, of.eos_token_id
    assert of("a")["input_ids"][0] == bos
    data = rows_of([TWO] * 4, tmp_path / "chats.jsonl").model_copy(update={"loss": Loss.ALL})
    ids = of.apply_chat_template(TWO, return_dict=True)["input_ids"]
    rows = windows(read_examples(data, of), of, 32)[0]["input_ids"]
    stream = (ids[1:] + ([] if ids[-1] == eos else [eos])) * 4
    assert [token for row in rows for token in row[1:]] == stream[: 31 * len(rows)]
    assert {row[0] for row in rows} == {bos}
    (first, *_) = tokenized_rows(read_examples(data, of), of, 400)["input_ids"]
    assert first == ids
