"""Texts to token ids: WordPiece vocabularies, and splits as one long row of tokens."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import WordPieceTrainer
from torch import Tensor

from coulomb._support.archive import MOST_JSON, check_file, check_tokenizer, parse_json
from coulomb._support.checks import check_count, retold
from coulomb._support.errors import FileFormatError, ParameterError
from coulomb.attention.encoder.layout import IGNORED, TokenBatch, token_places
from coulomb.text.data import Corpus, Split, Text, parts_of
from coulomb.text.settings import TextSettings
from coulomb.text.tasks import TASKS, data_folder

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
# Names of the unknown token, of the first and of the last of a text.
_NEEDED = (("[UNK]", "<unk>"), ("[CLS]", "<s>"), ("[SEP]", "</s>"))
_ALPHABET = 1000  # characters that a vocabulary of one's own knows
_LONGEST_WORD = 100  # characters; the library takes longer words as unknown
_MOST_HOLES = 1000  # numbers of no token, beside as many as there are tokens
_AT_ONCE = 2048  # texts that are tokenised together


class Vocabulary:
    """A WordPiece vocabulary and how texts are cut before it is looked up.

    Parameters
    ----------
    tokenizer
        Of the library `tokenizers`, with the post-processor of `vocabulary_of`.

    Examples
    --------
    >>> vocabulary = train_vocabulary(["a fine film", "a dull film"], size=40)
    >>> vocabulary.encode(["a film"], max_length=8)[0].tolist()[0] == vocabulary.cls
    True
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        known = tokenizer.get_vocab()
        missing = [names[0] for names in _NEEDED if not known.keys() & set(names)]
        if missing:
            needed = ", ".join(names[0] for names in _NEEDED)
            raise FileFormatError(
                f"The vocabulary has no {' and no '.join(missing)}; it must have "
                f"{needed}."
            )
        self.unknown, self.cls, self.end = (
            next(known[name] for name in names if name in known) for names in _NEEDED
        )
        self.size = max(known.values()) + 1
        if self.size > 2 * len(known) + _MOST_HOLES:  # a table would have as many rows
            raise FileFormatError(
                f"The vocabulary has {len(known):,} tokens, but numbers up to "
                f"{self.size - 1:,}. Number them one after another."
            )

    def encode(self, texts: Sequence[Text], max_length: int) -> list[np.ndarray]:
        """Cut texts into tokens, `[CLS] a [SEP]` or `[CLS] a [SEP] b [SEP]`.

        Parameters
        ----------
        texts
            Strings, or pairs of strings.
        max_length
            The longest sequence; the longer part of a pair is cut first.

        Returns
        -------
        list of numpy.ndarray
            Token ids of each text.
        """
        return [ids for ids, _ in self._encodings(texts, max_length)]

    def encode_pairs(
        self, texts: Sequence[Text], max_length: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Cut pairs into tokens, and say which text each token is from.

        Parameters
        ----------
        texts
            Pairs of strings.
        max_length
            The longest sequence; the longer part of a pair is cut first.

        Returns
        -------
        list of tuple
            Token ids; and 0 for `[CLS] a [SEP]`, 1 for `b [SEP]`.
        """
        found = []
        for ids, encoding in self._encodings(texts, max_length):
            # Special tokens are from neither text: they end what stands before.
            second = np.array([text == 1 for text in encoding.sequence_ids])
            found.append((ids, np.maximum.accumulate(second.astype(np.int64))))
        return found

    def encode_words(
        self, texts: Sequence[Text], max_length: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Cut words into tokens, and say where each word begins.

        Parameters
        ----------
        texts
            Tuples of words.
        max_length
            The longest sequence.

        Returns
        -------
        list of tuple
            Token ids; and the place of each word's first token, -1 for a word that was
            cut off or has no token.
        """
        found = []
        encodings = self._encodings([list(words) for words in texts], max_length, True)
        for words, (ids, encoding) in zip(texts, encodings, strict=True):
            first = np.full(len(words), -1)
            # From the back, so that the first token of a word is what stays.
            for place, word in reversed(list(enumerate(encoding.word_ids))):
                if word is not None:
                    first[word] = place
            found.append((ids, first))
        return found

    def _encodings(
        self, texts: Sequence[Any], max_length: int, words: bool = False
    ) -> Iterator[tuple[np.ndarray, Any]]:
        """Go through token ids and encodings, cut at the end of the longer text."""
        with retold("`max_length` is too small for the vocabulary"):
            self._tokenizer.enable_truncation(max_length, strategy="longest_first")
        for begin in range(0, len(texts), _AT_ONCE):
            part = list(texts[begin : begin + _AT_ONCE])
            with retold("The vocabulary cannot cut these texts"):
                cut = self._tokenizer.encode_batch(part, is_pretokenized=words)
            for encoding in cut:
                ids = np.array(encoding.ids, dtype=np.int64)
                if ids.max(initial=0) >= self.size:
                    raise FileFormatError(
                        f"The vocabulary gives the token {ids.max()}; it has "
                        f"{self.size}."
                    )
                yield ids, encoding

    def to_json(self) -> str:
        """Write the vocabulary down.

        Returns
        -------
        str
            The JSON of the library `tokenizers`.
        """
        self._tokenizer.no_truncation()
        return str(self._tokenizer.to_str(pretty=False))

    @classmethod
    def from_json(cls, text: str, source: str = "The vocabulary") -> "Vocabulary":
        """Read what `to_json` wrote.

        Parameters
        ----------
        text
            The JSON.
        source
            Where it is from, for the message.

        Returns
        -------
        Vocabulary
            The same.
        """
        complaint = " is not a tokenizer of the library `tokenizers`"
        with retold(source + complaint):
            found = parse_json(text, source, finite=False, complaint=complaint)
            check_tokenizer(found, source)
            tokenizer = Tokenizer.from_str(text)
            tokenizer.no_padding()
        return cls(tokenizer)


def vocabulary_of(tokens: dict[str, int], *, lower_case: bool = True) -> Vocabulary:
    """Build BERT's way of cutting texts around a WordPiece vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(tokens, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens([token for token in SPECIAL if token in tokens])
    vocabulary = Vocabulary(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", vocabulary.cls), ("[SEP]", vocabulary.end)],
    )
    return vocabulary


def read_vocabulary(path: str | Path, *, lower_case: bool = True) -> Vocabulary:
    """Read a vocabulary: `vocab.txt`, one token a line, or a `tokenizer.json`.

    Parameters
    ----------
    path
        The file.
    lower_case
        For `vocab.txt`; a `tokenizer.json` knows for itself.

    Returns
    -------
    Vocabulary
        Ready to encode.
    """
    path = check_file(path, MOST_JSON)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not UTF-8: {error}.") from error
    if path.suffix == ".json":
        return Vocabulary.from_json(text, str(path))
    lines = text.split("\n")
    tokens = {line.rstrip("\r"): number for number, line in enumerate(lines) if line}
    try:
        return vocabulary_of(tokens, lower_case=lower_case)
    except FileFormatError as error:
        raise FileFormatError(f"{path}: {error}") from error


def train_vocabulary(
    texts: Iterable[Text], *, size: int, lower_case: bool = True
) -> Vocabulary:
    """Make a WordPiece vocabulary from texts.

    The same texts give the same vocabulary: pieces inside words are numbered before the
    library would number them in the order of a hash table.

    Parameters
    ----------
    texts
        Strings, pairs or words.
    size
        Tokens it may have, special ones and single characters included.
    lower_case
        Whether texts are lower-cased and stripped of accents first.

    Returns
    -------
    Vocabulary
        Ready to encode.
    """
    check_count("size", size, at_most=10**6)
    strings = [part for text in texts for part in parts_of(text)]
    blank = vocabulary_of(
        {token: i for i, token in enumerate(SPECIAL)}, lower_case=lower_case
    )._tokenizer
    counts: Counter[str] = Counter()
    for string in strings:
        counts.update(blank.normalizer.normalize_str(string))
    common = sorted(counts, key=lambda c: (-counts[c], c))
    alphabet = sorted(c for c in common[:_ALPHABET] if not c.isspace())
    if not alphabet:
        raise ParameterError("`texts` must hold some characters; got none.")
    inside = [f"##{character}" for character in alphabet]
    trainer = WordPieceTrainer(
        vocab_size=max(size, len(SPECIAL) + 2 * len(alphabet)),
        min_frequency=2,
        show_progress=False,
        special_tokens=[*SPECIAL, *inside],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
    )
    # A list: the trainer holds the tokenizer, which a generator would wait for.
    short = [_without_long_words(blank, string) for string in strings]
    blank.train_from_iterator(short, trainer)
    return vocabulary_of(blank.get_vocab(), lower_case=lower_case)


def _without_long_words(tokenizer: Tokenizer, text: str) -> str:
    """Leave out words that are unknown for their length; pieces of them cost n^2."""
    if all(len(part) <= _LONGEST_WORD for part in text.split()):
        return text
    normal = tokenizer.normalizer.normalize_str(text)
    words = (word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(normal))
    return " ".join(word for word in words if len(word) <= _LONGEST_WORD)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """A split as one long row of token ids."""

    token_ids: Tensor
    offsets: Tensor
    labels: Tensor | None = None
    first: Tensor | None = None
    word_offsets: Tensor | None = None
    parts: Tensor | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        """Tokens of each text."""
        return self.offsets.diff()

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Say where the tokens of some texts are, and the bounds of the texts."""
        return token_places(self.offsets, rows)

    def batch(self, rows: Tensor) -> TokenBatch:
        """Put some texts one after another."""
        places, bounds = self.places(rows)
        labels = self.labels
        if labels is not None:
            labels = labels[rows] if self.first is None else labels[places]
        parts = None if self.parts is None else self.parts[places]
        return TokenBatch(self.token_ids[places], bounds, labels, parts)

    def renumber(self, kept: Tensor, unknown: int) -> "TokenRows":
        """Give the tokens the numbers they have in a trimmed vocabulary."""
        places = torch.searchsorted(kept, self.token_ids).clamp_max(len(kept) - 1)
        ids = places.where(kept[places] == self.token_ids, torch.tensor(unknown))
        return replace(self, token_ids=ids)


def encode_split(
    vocabulary: Vocabulary, split: Split, *, kind: str, max_length: int
) -> TokenRows:
    """Turn a split into token ids."""
    if kind != "token":
        labels = None if split.labels is None else torch.tensor(list(split.labels))
        if split.texts and not isinstance(split.texts[0], str):
            both = vocabulary.encode_pairs(split.texts, max_length)
            parts, _ = _joined([part for _, part in both])
            return TokenRows(*_joined([ids for ids, _ in both]), labels, parts=parts)
        return TokenRows(*_joined(vocabulary.encode(split.texts, max_length)), labels)
    pairs = vocabulary.encode_words(split.texts, max_length)
    token_ids, offsets = _joined([row for row, _ in pairs])
    starts, word_offsets = _joined([first for _, first in pairs])
    shift = offsets[:-1].repeat_interleave(word_offsets.diff())
    first = torch.where(starts >= 0, starts + shift, starts)
    tags = None
    if split.labels is not None:
        words = torch.tensor([tag for tags in split.labels for tag in tags])
        tags = torch.full_like(token_ids, IGNORED)
        tags[first[first >= 0]] = words[first >= 0]
    return TokenRows(token_ids, offsets, tags, first, word_offsets)


def _joined(rows: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    flat = np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64)
    return torch.from_numpy(flat.astype(np.int64)), lengths.cumsum(0)


def choose_vocabulary(
    corpus: Corpus,
    settings: TextSettings,
    file: str | Path | None = None,
    folder: str | Path | None = None,
) -> Vocabulary:
    """Take the vocabulary of a file, of the data folder, or train one."""
    size, lower = settings.tokens.vocabulary_size, settings.tokens.lower_case
    if settings.model.encoder:
        from coulomb.text.pretrained import encoder_vocabulary  # which needs this file

        if file is not None:
            raise ParameterError(
                "`vocabulary` must not be given with `encoder`, which has its own."
            )
        return encoder_vocabulary(settings.model.encoder, corpus.kind)
    if file is not None:
        return read_vocabulary(file, lower_case=lower)
    where = data_folder(folder)
    english = corpus.name in TASKS and TASKS[corpus.name].english
    if where is not None and lower and english:
        for name in ("bert-base-uncased/vocab.txt", "vocab.txt"):
            if (where / name).is_file():
                return read_vocabulary(where / name)
    return train_vocabulary(corpus.split("train").texts, size=size, lower_case=lower)
