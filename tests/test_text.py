"""Properties of prompts, loss masks and draft vocabularies that hold for any input."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k2eagle.text import Sample, count_tokens, draft_vocab, encode, prompt_tokens, prompts, show_tokens

HEAD = ("{% for m in messages %}"
        "{% if loop.first and m['role'] != 'system' %}{{ '<s>system\nBe kind.</s>\n' }}{% endif %}"
        "{{ '<s>' + m['role'] + '\n' }}")
FOOT = "{% endfor %}{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
PLAIN = HEAD + "{{ m['content'] + '</s>\n' }}" + FOOT
MARKED = (HEAD + "{% if m['role'] == 'assistant' %}"
          "{% generation %}{{ m['content'] + '</s>' }}{% endgeneration %}{{ '\n' }}"
          "{% else %}{{ m['content'] + '</s>\n' }}{% endif %}" + FOOT)


def tiny_tokenizer(template: str):
    """Train a byte-level BPE of 400 tokens whose merges reach across line breaks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    texts = [prompt.text for prompt in prompts(200)] + ["assistant\n\n\nuser\n\n"] * 50
    core.train_from_iterator(texts, trainer)
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=template, **special)


plain, marked = tiny_tokenizer(PLAIN), tiny_tokenizer(MARKED)
content = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<>"), max_size=30)
counts = st.lists(st.integers(0, 5), min_size=1, max_size=60).filter(any)


@st.composite
def conversations(draw):
    turns = [{"role": role, "content": draw(content)}
             for _ in range(draw(st.integers(1, 3))) for role in ("user", "assistant")]
    return ([{"role": "system", "content": draw(content)}] if draw(st.booleans()) else []) + turns


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_prefixes_and_marks_give_the_same_sample(messages):
    assert encode(plain, messages) == encode(marked, messages)


@settings(max_examples=150, deadline=None)
@given(conversations())
def test_mask_holds_every_answer_with_its_end_and_nothing_else(messages):
    sample = encode(plain, messages)
    assert plain.decode(sample.tokens) == plain.apply_chat_template(messages, tokenize=False)
    answers = [token for token, flag in zip(sample.tokens, sample.loss_mask) if flag]
    expected = "".join(m["content"] + "</s>" for m in messages if m["role"] == "assistant")
    assert plain.decode(answers) == expected
    starts = sum(flag and not before for before, flag in zip([False, *sample.loss_mask], sample.loss_mask))
    assert starts == sum(m["role"] == "assistant" for m in messages)


@settings(max_examples=50, deadline=None)
@given(content.filter(str.strip), content)
def test_an_encoded_answer_continues_the_prompt(question, answer):
    tokens = prompt_tokens(plain, question)
    sample = encode(plain, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}])
    assert sample.tokens[:len(tokens)] == tokens
    assert not any(sample.loss_mask[:len(tokens)]) and sample.loss_mask[len(tokens)]


@settings(max_examples=50, deadline=None)
@given(content)
def test_token_view_lets_no_markup_through(text):
    tokens = plain.encode("<script>" + text, add_special_tokens=False)
    markup = show_tokens(plain, tokens, [True] * len(tokens))._repr_html_()
    assert markup.count("<span") == len(tokens) + 2  # two in the legend
    assert "<script" not in markup and markup.count("<div") == 2


@settings(max_examples=300, deadline=None)
@given(counts, st.data())
def test_draft_vocabulary_tables_agree(counts, data):
    counts = np.array(counts)
    size = data.draw(st.integers(1, len(counts)))
    vocab = draft_vocab(counts, size)
    kept = np.arange(size) + vocab.d2t.numpy()
    assert kept.tolist() == np.flatnonzero(vocab.t2d.numpy()).tolist()
    assert (np.diff(kept) > 0).all() and (np.diff(vocab.d2t.numpy()) >= 0).all()
    assert vocab.coverage == pytest.approx(counts[kept].sum() / counts.sum())
    assert vocab.seen == (counts[kept] > 0).sum() == min(size, (counts > 0).sum())
    left = np.setdiff1d(np.arange(len(counts)), kept)
    order = lambda ids: [(-counts[i], i) for i in ids]  # most frequent first, then the lowest id
    assert not len(left) or max(order(kept)) < min(order(left))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(0, 19), st.booleans()), max_size=12), min_size=1, max_size=5))
def test_counts_are_the_masked_tokens(documents):
    samples = [Sample(str(i), [t for t, _ in d], [m for _, m in d]) for i, d in enumerate(documents)]
    expected = Counter(token for document in documents for token, flag in document if flag)
    assert count_tokens(samples, 20).tolist() == [expected[token] for token in range(20)]


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 180), st.sampled_from(["train", "heldout", None]), st.integers(0, 3))
def test_any_beginning_is_a_balanced_mix(count, split, seed):
    chosen = prompts(count, split, seed)
    assert len({prompt.id for prompt in chosen}) == count
    assert split is None or {prompt.split for prompt in chosen} == {split}
    by_kind = Counter(prompt.form.split("-")[0] for prompt in chosen)
    everything = Counter(prompt.form.split("-")[0] for prompt in prompts(split=split))
    for kind, number in everything.items():
        assert abs(by_kind[kind] - count * number / everything.total()) <= 1
    if split != "heldout":  # held-out forms run out at different times
        for kind in by_kind:
            forms = Counter(prompt.form for prompt in chosen if prompt.form.startswith(kind + "-"))
            assert max(forms.values()) - min(forms.values()) <= 1


def test_prompts_do_not_depend_on_the_process():
    code = ("import hashlib, sys; from k2eagle.text import prompts;"
            "print(hashlib.sha256(repr(prompts()).encode()).hexdigest(), 'torch' in sys.modules)")
    seen = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           env={"PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")}
    assert len(seen) == 1 and seen.pop().endswith("False\n")  # same text, and torch not imported
