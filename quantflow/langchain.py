"""An artifact as a LangChain LLM; the extra `langchain` installs what it needs.

    from quantflow.langchain import QuantflowLLM
    llm = QuantflowLLM(artifact="work/4-export", max_new_tokens=64)
    chain = PromptTemplate.from_template("def {name}(") | llm

For chat models and tools, serve the artifact and use
`langchain_openai.ChatOpenAI(base_url="http://127.0.0.1:8000/v1")`.
"""

from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, LLMResult
from pydantic import PrivateAttr

from quantflow.runtime.text_pipeline import TextGeneration


class QuantflowLLM(BaseLLM):
    """An artifact that continues texts.

    Attributes:
        artifact: folder of the artifact, loaded with the first call.
        max_new_tokens: tokens added to a text, at most.
        options: options of `TextGeneration.__call__`: temperature, top_p, seed and so on.
    """

    artifact: str
    max_new_tokens: int = 256
    options: dict[str, Any] = {}
    _generator: TextGeneration | None = PrivateAttr(default=None)

    @property
    def _llm_type(self) -> str:
        return "quantflow"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"artifact": self.artifact, "max_new_tokens": self.max_new_tokens, **self.options}

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        """Continue prompts, all at once; a stop string is no part of its text."""
        del run_manager
        if self._generator is None:
            self._generator = TextGeneration(self.artifact)
        options = {"max_new_tokens": self.max_new_tokens, **self.options, **kwargs}
        outputs = self._generator(
            prompts, stop_strings=stop or (), return_full_text=False, **options
        )
        generations = [
            [Generation(text=_before(one["generated_text"], stop)) for one in several]
            for several in outputs
        ]
        return LLMResult(generations=generations)


def _before(text: str, stop: list[str] | None) -> str:
    return text[
        : min((place for word in stop or () if (place := text.find(word)) >= 0), default=len(text))
    ]
