"""What a piece of a model's text adds to the assistant's message: content, reasoning, tool calls."""

from dataclasses import dataclass, field


@dataclass
class CallDelta:
    """News of one tool call. `name` comes with the first of them only; the arguments' texts join to JSON."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass
class AssistantDelta:
    """Filled by the readers of the text's parts, in the order of the text within each field."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.reasoning or self.calls)

    def begin_call(self, index: int, name: str) -> None:
        self.calls.append(CallDelta(index, name))

    def add_arguments(self, index: int, text: str) -> None:
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index))
        self.calls[-1].arguments += text

    def add(self, other: "AssistantDelta") -> None:
        """Join what came later; one entry per call is left."""
        self.content += other.content
        self.reasoning += other.reasoning
        for call in other.calls:
            if call.name is not None:
                self.begin_call(call.index, call.name)
            self.add_arguments(call.index, call.arguments)
