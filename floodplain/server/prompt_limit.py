"""The limit of a prompt's tokens."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.errors import RequestRefused


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Refuses prompts with too many tokens.

    Attributes:
        max_model_len: Most tokens of prompt and output; a prompt of so many leaves no room for output.
    """

    max_model_len: int

    def check(self, num_tokens: int, what: str) -> None:
        """Refuse a prompt that cannot fit.

        Args:
            num_tokens: A lower bound on the prompt's number of tokens.
            what: The prompt, as the error describes it.

        Raises:
            RequestRefused: The prompt and one token of output cannot fit.
        """
        if num_tokens >= self.max_model_len:
            limit = f"the {self.max_model_len} tokens of max_model_len"
            raise RequestRefused(f"{what} and the output are more than {limit}: send a shorter prompt")
