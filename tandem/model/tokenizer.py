"""Tokenizers: loaded from a folder or the hub, or built from a list of characters."""

from __future__ import annotations

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tandem.errors import ModelError

PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
LONGEST_INPUT = 1_000_000_000  # "no limit": the limits on lengths are Tandem's own options


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, after `<pad>` (0) and `<eos>` (1).

    It has no token for unknown characters on purpose: text with a character outside of the list cannot be
    encoded, instead of becoming something else in silence. `unknown_characters` finds them beforehand.

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
        model_max_length=LONGEST_INPUT,
    )
