"""ROUGE of a written summary beside the one in the document.

F measures, words stemmed. Lin 2004, by the package rouge_score.

The package rouge_score computes it.
A task names it with `process_results: !function rouge.scores`; its documents have `summary`.
"""

from collections.abc import Mapping, Sequence

from rouge_score.rouge_scorer import RougeScorer

_SCORER = RougeScorer(["rougeL", "rouge1", "rouge2"], use_stemmer=True)


def scores(document: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
    """Return rougeL, rouge1 and rouge2 of the first result, 0 to 1."""
    found = _SCORER.score(document["summary"], results[0])
    return {name: float(score.fmeasure) for name, score in found.items()}
