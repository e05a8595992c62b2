"""Tokenizers: loaded from a folder or the hub, or built from a list of characters."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from tandem.config.model import CharacterTokenizer, ModelConfig
from tandem.errors import ModelError
from tandem.model.source import check_hub_name, foreign_code, resolve_model_path

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"

# A tokenizer saved under these class names is its tokenizer.json, whatever the architecture. AutoTokenizer would
# rebuild it by the architecture's habits; for Qwen2 that loses the spaces of a character tokenizer.
_AS_IT_STANDS = ("TokenizersBackend", "PreTrainedTokenizerFast")
_LONGEST_INPUT = 1_000_000_000  # "no limit": the limits on lengths are Tandem's own options


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, after `<pad>` (0) and `<eos>` (1).

    It has no token for unknown characters on purpose: text with a character outside of the list cannot be
    encoded, instead of becoming something else in silence.

    Args:
        characters: The alphabet, in the order of the token ids. A space and a newline are characters, too.

    Raises:
        ModelError: The list is empty, or a character stands in it twice.
    """
    if not characters:
        raise ModelError("model.tokenizer.characters is empty", remedy='list them: {characters: "0123456789+= "}')
    twice = sorted({character for character in characters if characters.count(character) > 1})
    if twice:
        listed = ", ".join(repr(character) for character in twice)
        raise ModelError(f"model.tokenizer.characters has {listed} more than once", remedy="list each character once")
    vocabulary = {token: index for index, token in enumerate([PAD_TOKEN, EOS_TOKEN, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()  # without it, decoding puts a space between tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=_LONGEST_INPUT,
    )


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer that `model.tokenizer` names or describes; by default the model's own.

    Raises:
        ModelError: There is none, it cannot be read, or it needs code that is shipped with it.
    """
    if isinstance(config.tokenizer, CharacterTokenizer):
        return character_tokenizer(config.tokenizer.characters)
    key = "model.path" if config.tokenizer is None else "model.tokenizer"
    name = config.path if config.tokenizer is None else config.tokenizer
    if name is None:
        raise ModelError(
            "model.new needs a tokenizer, and model.tokenizer is not given",
            remedy='name a folder or hub model, or build one: tokenizer: {characters: "0123456789+= "}',
        )
    found = resolve_model_path(name, key=key)
    if isinstance(found, str):
        check_hub_name(found, key)
    path = str(found)
    try:
        if get_tokenizer_config(path).get("tokenizer_class") in _AS_IT_STANDS:
            tokenizer: PreTrainedTokenizerBase | None = PreTrainedTokenizerFast.from_pretrained(path)
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        if "trust_remote_code" in str(error):
            raise foreign_code(key, name) from error
        raise _no_tokenizer(key, name, str(error)) from error
    if tokenizer is None or tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys():
        # For some architectures transformers makes a tokenizer of special tokens only where it finds no files.
        raise _no_tokenizer(key, name, "it has no vocabulary")
    return tokenizer


def eos_ids(generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token id that ends a response: those of the generation config and the tokenizer's, ascending.

    Chat models often have two: the end of the turn, and the end of the text.
    """
    given = generation_config.eos_token_id
    ids = {given} if isinstance(given, int) else set(given or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return tuple(sorted(ids))


def tokenizer_size(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the largest token id: the rows that an embedding needs at least."""
    return max(tokenizer.get_vocab().values()) + 1


def check_same_tokens(policy: ModelConfig, path: str, *, key: str) -> None:
    """Raise ModelError where a second model, at the config key `key`, has a tokenizer by which ids mean other tokens.

    Names of special tokens are not compared. Of a folder without a tokenizer, or of a hub name, nothing is said.
    """
    folder = resolve_model_path(path, key=key)
    if isinstance(folder, str) or not (folder / "tokenizer.json").is_file():
        return
    try:
        second = load_tokenizer(policy.model_copy(update={"path": str(folder), "new": None, "tokenizer": None}))
    except ModelError:  # it is not used
        return
    ours, theirs = _ordinary(load_tokenizer(policy)), _ordinary(second)
    others = [token for token in sorted(ours.keys() & theirs.keys()) if ours[token] != theirs[token]]
    if others:
        example = f"{others[0]} is {theirs[others[0]]!r} there, and {ours[others[0]]!r} for the policy"
        raise ModelError(
            f"{key}: {path!r} has another tokenizer: {len(others)} ids are other tokens, such as {example}",
            remedy="give a model with the policy's tokenizer",
        )


def _ordinary(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Its tokens by id, without those that were added to the vocabulary."""
    added = tokenizer.get_added_vocab()
    return {number: token for token, number in tokenizer.get_vocab().items() if token not in added}


def _no_tokenizer(key: str, name: str, reason: str) -> ModelError:
    return ModelError(
        f"{key}: no tokenizer can be read from {name!r}: {reason}",
        remedy="the folder needs tokenizer.json; or set model.tokenizer to a folder or hub name that has one",
    )
