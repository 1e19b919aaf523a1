# SPDX-License-Identifier: Apache-2.0
"""Real documents for the demo: finds text on this machine, tokenises it and packs it. Downloads nothing."""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from paddle_fm3.integration.paddlenlp.collator import pack_documents

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
TEXT_FIELDS = ("text", "content", "document")  # of a .jsonl line or a .parquet column, first match


class DemoError(Exception):
    """Something the user can put right; the demo prints it as one line."""


@dataclass(frozen=True)
class Tokenizer:
    """Text -> token ids. `vocab_size` counts the end-of-document token, which is the last id."""

    encode: Callable[[str], list[int]]
    vocab_size: int
    name: str

    @property
    def end_token_id(self) -> int:
        return self.vocab_size - 1


def load_tokenizer(path: str | None) -> Tokenizer:
    """The tokenizer of a Hugging Face `tokenizer.json`, or bytes (256 tokens) if path is None."""
    if path is None:
        return Tokenizer(lambda text: list(text.encode()), 257, "bytes")
    if not Path(path).is_file():
        raise DemoError(f"the tokenizer file {path} does not exist")
    from tokenizers import Tokenizer as FastTokenizer

    try:
        fast = FastTokenizer.from_file(path)
    except Exception as error:  # the library raises bare Exception
        raise DemoError(f"{path} is not a tokenizer.json: {error}") from error
    return Tokenizer(
        lambda text: fast.encode(text, add_special_tokens=False).ids, fast.get_vocab_size() + 1, Path(path).name
    )


def find_files(data: str | None) -> list[Path]:
    """Text files under the folder (or the file itself), sorted; the running Python's own sources if data is None."""
    if data is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path for path in root.rglob("*") if path.suffix in (".py", ".txt", ".md")]
        return sorted(path for path in files if not {"site-packages", "dist-packages"} & set(path.parts))
    root = Path(data)
    if not root.exists():
        raise DemoError(f"the data folder {data} does not exist")
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    files = [path for path in files if path.suffix.lower() in SUFFIXES]
    if not files:
        raise DemoError(f"{data} holds no {', '.join(SUFFIXES)} file")
    return files


def read_documents(path: Path) -> Iterator[str]:
    """The documents of one file: a whole text or source file, one a line of .jsonl, one a row of .parquet."""
    if path.suffix.lower() == ".jsonl":
        with path.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_text(path, number, line)
    elif path.suffix.lower() == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            file = parquet.ParquetFile(path)
        except (ArrowException, OSError) as error:
            raise DemoError(f"{path} is not a readable .parquet file: {error}") from error
        names = [name for name in TEXT_FIELDS if name in file.schema_arrow.names]
        if not names:
            raise DemoError(f"{path} has columns {file.schema_arrow.names}; one of {', '.join(TEXT_FIELDS)} is needed")
        for batch in file.iter_batches(256, columns=names[:1]):
            for text in batch.column(0).to_pylist():
                if text and not isinstance(text, str):
                    raise DemoError(f"{path}, column {names[0]}: holds {type(text).__name__}; text is needed")
                if text:
                    yield text
    else:
        yield path.read_text(encoding="utf-8", errors="replace")


def _documents_of(text: str, tokenizer: Tokenizer, max_document: int) -> list[list[int]]:
    """The text as one document of 2 to max_document tokens, or its sections, those that are too long cut."""
    tokens = tokenizer.encode(text)
    # A section ends at a blank line that is followed by a line without indentation: a function, a paragraph.
    sections = [tokens] if len(tokens) < max_document else map(tokenizer.encode, re.split(r"\n\s*\n(?=\S)", text))
    documents = []
    for section in sections:
        if section:
            section.append(tokenizer.end_token_id)
            documents.extend(_pieces(section, max_document))
    return documents


def _pieces(section: list[int], max_document: int) -> Iterator[list[int]]:
    """The section, or pieces of max_document/8 to max_document tokens: equal ones would not fill a sequence."""
    rng = random.Random(len(section))
    begin = 0
    while begin < len(section):
        is_last = len(section) - begin <= max_document
        end = len(section) if is_last else begin + rng.randint(max(max_document // 8, 1), max_document)
        yield section[begin:end]
        begin = end


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DemoError(f"{path}, line {number}: not JSON ({error})") from error
    for name in TEXT_FIELDS:
        if isinstance(record, dict) and isinstance(record.get(name), str):
            return record[name]
    raise DemoError(f"{path}, line {number}: no text in any of the fields {', '.join(TEXT_FIELDS)}")


def packed_sequences(
    files: list[Path], tokenizer: Tokenizer, *, s: int, num_sequences: int, max_document: int, seed: int
) -> list[list[list[int]]]:
    """num_sequences packs of whole documents, each at least 90 % full; documents keep their own, uneven lengths.

    Files are read in shuffled order until there is enough; the data starts over if it is too short. A text of more
    than max_document tokens would leave no room for others: each of its sections becomes a document.
    """
    files = list(files)
    random.Random(seed).shuffle(files)
    stream = _document_stream(files, tokenizer, max_document, tokens_per_turn=4 * s)
    documents: list[list[int]] = []
    num_tokens = 0
    for surplus in (1.2, 1.5, 2.0, 3.0, 5.0):
        while num_tokens < num_sequences * s * surplus:
            documents.append(next(stream))
            num_tokens += len(documents[-1])
        shuffle = random.Random(seed + 1).shuffle
        shuffled = list(documents)
        shuffle(shuffled)
        packs = [pack for pack in pack_documents(shuffled, s) if sum(map(len, pack)) >= 0.9 * s][:num_sequences]
        if len(packs) == num_sequences:
            for pack in packs:
                shuffle(pack)  # first fit leaves the shortest documents at the end
            return packs
    raise DemoError(f"documents of this data cannot fill {num_sequences} sequences of {s} tokens to 90 %")


def _document_stream(
    files: list[Path], tokenizer: Tokenizer, max_document: int, *, tokens_per_turn: int
) -> Iterator[list[int]]:
    """Tokenised documents without end. Files take turns, so that a few large ones do not make up all the data."""
    while True:
        num_yielded = 0
        readers = deque(_read_tokenised(path, tokenizer, max_document) for path in files)
        while readers:
            reader = readers.popleft()
            num_taken = 0
            for document in reader:
                yield document
                num_yielded += 1
                num_taken += len(document)
                if num_taken >= tokens_per_turn:
                    readers.append(reader)
                    break
        if num_yielded == 0:
            raise DemoError("the files hold no text")


def _read_tokenised(path: Path, tokenizer: Tokenizer, max_document: int) -> Iterator[list[int]]:
    for text in read_documents(path):
        yield from _documents_of(text, tokenizer, max_document)
