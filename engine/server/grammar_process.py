"""The process that tries grammars: the tokenizer on its standard input, then a grammar a line; a verdict a line back.

A grammar that takes too long ends it, by an alarm that needs no thread and no parent to be alive.
"""

import signal
import sys

import msgspec
from tokenizers import Tokenizer

from mambalign.worker.grammar import GrammarCompiler
from mambalign.worker.sampling_params import StructuredOutputs


class Vocabulary(msgspec.Struct, frozen=True):
    """The first line: what grammars are compiled for."""

    tokenizer: str  # tokenizer.json
    vocab_size: int
    eos_token_ids: list[int]
    seconds: float  # that a grammar may take


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's business, whose end closes the input
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=Vocabulary)
    compiler = GrammarCompiler(Tokenizer.from_str(given.tokenizer), given.vocab_size, given.eos_token_ids)
    compiler.make(StructuredOutputs(json_object=True))  # what the first one takes longer for
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for line in sys.stdin.buffer:
        error = None
        signal.setitimer(signal.ITIMER_REAL, given.seconds)
        try:
            compiler.make(msgspec.json.decode(line, type=StructuredOutputs))
        except ValueError as raised:
            error = str(raised)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(msgspec.json.encode(error) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
