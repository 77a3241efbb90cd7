"""How many tokens a prompt may have."""

from __future__ import annotations

from dataclasses import dataclass

from floodplain.core.errors import RequestRefused


@dataclass(frozen=True, slots=True)
class PromptLimit:
    """Refuses prompts by their number of tokens.

    Attributes:
        max_model_len: A prompt of so many tokens leaves no room for its output.
    """

    max_model_len: int

    def check(self, num_tokens: int, what: str) -> None:
        """Let a prompt pass that may fit.

        Args:
            num_tokens: How many it has at least.
            what: It, in the words of the error.

        Raises:
            RequestRefused: It cannot fit.
        """
        if num_tokens >= self.max_model_len:
            limit = f"the {self.max_model_len} tokens of max_model_len"
            raise RequestRefused(f"{what} and the output are more than {limit}: send a shorter prompt")
