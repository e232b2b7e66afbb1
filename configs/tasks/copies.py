"""A long text that a model writes beside the one that it was to write, word by word.

A task names it with `process_results: !function copies.scores`; its documents have `text`. Errors
of a long answer grow: a word that is wrong once is read by all that follow.
"""

from collections.abc import Mapping, Sequence


def scores(document: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """Of the first result, 0 to 1 each.

    Returns:
        before_error: the share of the text's words before the first that differs or is missing;
        whole: 1 where none does.
    """
    words, found = document["text"].split(), results[0].split()
    alike = 0
    while alike < min(len(words), len(found)) and words[alike] == found[alike]:
        alike += 1
    return {"before_error": alike / len(words), "whole": float(alike == len(words))}
