"""Recall documents: what is asked was stated once, before; sizes are exact; nothing else is drawn.

Token ids are checked against a sentencepiece model trained here by sentencepiece itself.
"""

from __future__ import annotations

import io
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import sentencepiece

from alibi_lm.data.tokenizer import Tokenizer
from alibi_lm.tasks import associative_recall as mqar
from alibi_lm.tasks import passkey, statements
from alibi_lm.tasks.config import TaskSizes
from alibi_lm.tasks.passkey import Passkey
from alibi_lm.tasks.prompt import Encoder
from alibi_lm.tasks.recall_documents import Filler, RecallGenerator
from alibi_lm.utils.errors import DataError

SENTENCES = " ".join(passkey.FILLER)


def real_text() -> str:
    rng = random.Random(0)
    words = ["".join(rng.choice("abcdefghij") for _ in range(rng.randint(1, 7))) for _ in range(99)]
    return "\n".join(" ".join(rng.choices(words, k=rng.randint(1, 12))) for _ in range(2000))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model = io.BytesIO()
    keys = "\n".join(statements.STATEMENT.format(key=key) for key in statements.KEYS)
    text = f"{passkey.HEAD}{SENTENCES}{passkey.KEY_LINE}{passkey.QUESTION}\n{keys}\n{real_text()}"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text[i : i + 3000] for i in range(0, len(text), 3000)),
        model_writer=model, model_type="bpe", vocab_size=700, byte_fallback=True,
        normalization_rule_name="identity", add_dummy_prefix=False, split_digits=True,
        remove_extra_whitespaces=False, minloglevel=2)  # fmt: skip
    path = tmp_path_factory.mktemp("recall") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return Tokenizer(path)


def maker_of(tokenizer: Tokenizer, *kinds: str, size: int = 256, dense: float = 0.5, seed: int = 0):  # type: ignore[no-untyped-def]
    filler = Filler(real_text(), tokenizer.encode, tokenizer.decode)
    return RecallGenerator(kinds, size, dense, seed, filler, tokenizer.encode)


def ids_of(tokenizer: Tokenizer, pieces: tuple[str, ...]) -> list[int]:
    return [token for piece in pieces for token in tokenizer.encode(piece)]


@pytest.mark.parametrize("size", [200, 256, 517])
def test_documents_with_their_end_have_exactly_the_tokens_asked_for(
    tokenizer: Tokenizer, size: int
) -> None:
    maker = maker_of(tokenizer, "statements", "passkey", "pairs", size=size)
    kinds: Counter[str] = Counter()
    for index in range(200):
        pieces = maker.document(index)
        ids = ids_of(tokenizer, pieces)
        assert len(ids) == size - 1
        assert all(pieces)
        # Nothing is lost on the way: the ids say what the pieces say.
        assert tokenizer.decode(ids) == "".join(pieces)
        text = "".join(pieces)
        kinds["passkey" if passkey.HEAD in text else "number" if "secret" in text else "pairs"] += 1
    assert len(kinds) == 3
    assert min(kinds.values()) > 30


def test_every_statement_is_asked_for_once_after_it(tokenizer: Tokenizer) -> None:
    line = re.compile(r"\n# The secret number of (\w+-\d) is (\d{5})\.\n")
    numbers: set[str] = set()
    counts: set[int] = set()
    for index in range(150):
        pieces = maker_of(tokenizer, "statements", size=300).document(index)
        text = "".join(pieces)
        found = line.findall(text)
        keys = [key for key, _ in found]
        facts = dict(found[: len(found) // 2])
        asked = dict(found[len(found) // 2 :])
        assert asked == facts
        assert len(facts) == len(found) // 2 >= 1
        for key, number in facts.items():
            assert keys.count(key) == 2
            assert text.count(number) == 2  # stated once, answered once
        numbers.update(facts.values())
        counts.add(len(facts))
        # The last words are a prompt of the eval with its answer.
        assert pieces[-3:] == (statements.STATEMENT.format(key=keys[-1]),
                               statements.ANSWER.format(number=facts[keys[-1]]),
                               statements.END)  # fmt: skip
    assert len(numbers) > 140
    assert len(counts) > 2


def test_every_pair_is_asked_for_once_after_all_pairs(tokenizer: Tokenizer) -> None:
    line = re.compile(r"\n([A-Z]{2}): (\d\d)(?=\n|$)")
    for index in range(150):
        pieces = maker_of(tokenizer, "pairs").document(index)
        found = line.findall("".join(pieces))
        half = len(found) // 2
        assert half >= 1
        assert len(found) == 2 * half
        assert sorted(found[:half]) == sorted(found[half:])
        assert len({key for key, _ in found}) == half
        queries = [piece for piece in pieces if piece.endswith(":") and piece.startswith("\n")]
        assert queries[half:] == [mqar.QUERY.format(key=key) for key, _ in found[half:]]


def test_passkeys_are_the_evals_prompts_with_their_answer(tokenizer: Tokenizer) -> None:
    """Put together by the eval's own maker for the same key and place: the same token ids."""
    task = Passkey(Encoder(tokenizer), 0, TaskSizes())
    places = set()
    for index in range(60):
        ids = ids_of(tokenizer, maker_of(tokenizer, "passkey").document(index))
        text = tokenizer.decode(ids)
        (number,) = set(re.findall(r"\d{5}", text))
        assert len(re.findall(number, text)) == 3
        answer = tokenizer.encode(passkey.ANSWER.format(key=number))
        chosen = next((a for a in task._pool if a.number == number), None)
        line = task._line(chosen) if chosen else None
        parts = passkey.KEY_LINE.split("{key}")
        expected = [*tokenizer.encode(parts[0].rstrip()), *answer,
                    *tokenizer.encode(parts[1].rstrip()), *answer,
                    *tokenizer.encode(parts[2])]  # fmt: skip
        assert line is None or line == expected
        head, tail = tokenizer.encode(passkey.HEAD), tokenizer.encode(passkey.QUESTION)
        start = next(i for i in range(len(ids)) if ids[i : i + len(expected)] == expected)
        end = len(ids) - len(answer) - len(tail)
        while ids[end : end + len(tail) + len(answer)] != [*tail, *answer]:
            end -= 1  # a cut sentence that could not be spelled lets text follow the answer
        after = task._sentences(end - start - len(expected))
        before = task._filled(start - len(head)).tolist()
        assert ids[: len(head)] == head
        assert ids[len(head) : start] == before or end < len(ids) - len(answer) - len(tail)
        assert ids[start + len(expected) : end] == after
        places.add(start)
    assert len(places) > 5  # whole sentences apart


def test_documents_depend_on_seed_and_number_only(tokenizer: Tokenizer) -> None:
    first = maker_of(tokenizer, "statements", "pairs")
    again = maker_of(tokenizer, "statements", "pairs")
    again.document(7)
    assert [first.document(i) for i in range(9)] == [again.document(i) for i in range(9)]
    other = maker_of(tokenizer, "statements", "pairs", seed=1)
    assert all(first.document(i) != other.document(i) for i in range(9))
    assert len({first.document(i) for i in range(200)}) == 200


def test_dense_documents_have_as_many_facts_as_fit(tokenizer: Tokenizer) -> None:
    for index in range(40):
        dense = "".join(maker_of(tokenizer, "pairs", dense=1.0).document(index))
        sparse = "".join(maker_of(tokenizer, "pairs", dense=0.0).document(index))
        size = 2 * len(tokenizer.encode("\nQX: 12"))
        assert len(re.findall(r"[A-Z]{2}: \d\d", dense)) >= 2 * (240 // size - 3)
        assert len(re.findall(r"[A-Z]{2}: \d\d", sparse)) <= len(dense)


def test_what_cannot_be_made_is_said(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"recall.max_tokens = 60: .* kind passkey"):
        maker_of(tokenizer, "passkey", size=60)
    with pytest.raises(DataError, match="3 characters of filler"):
        Filler("abc", tokenizer.encode, tokenizer.decode)
