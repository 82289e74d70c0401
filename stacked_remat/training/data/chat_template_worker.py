"""A program that runs chat templates: a process of its own, whose memory and time are bounded.

Templates are programs by others: Jinja's sandbox keeps them from files and from Python's internals, and not
from endless loops and giant texts. `chat_template.py` starts this program.
"""

import functools
import json
import pickle
import resource
import signal
import sys
from typing import Any

BEGIN, END = "\ufdd0", "\ufdd1"
_SHOWN = 1000  # letters of an error that a template makes up


@functools.cache
def _environment() -> Any:
    import jinja2.exceptions
    import jinja2.ext
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """Knows the tags that some templates put around what the assistant says."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Any) -> str:
            return f"{BEGIN}{caller()}{END}"

    def refuse(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = refuse
    environment.filters["tojson"] = _as_json
    return environment


def _as_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes what would be HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    return _environment().from_string(source)


def _answer(source: str, values: dict[str, Any]) -> dict[str, Any]:
    try:
        compiled = _compile(source)
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # also what Jinja computes while it compiles, because it is constant
        return {"line": getattr(error, "lineno", 1), "error": str(error)[:_SHOWN]}
    try:
        return {"text": compiled.render(**values)}
    except MemoryError:
        return {"limit": "memory"}
    except Exception as error:  # whatever a program of others can raise
        return {"error": str(error)[:_SHOWN]}


def main(memory: int, seconds: int) -> None:
    """Answers requests from standard input, each a pickle after its length, with JSON after its length."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.read(8):
        source, values = pickle.loads(requests.read(int.from_bytes(header, "little")))
        signal.alarm(2 * seconds)  # ends this process if the one that asks is no longer there to do so
        try:
            answer = json.dumps(_answer(source, values)).encode()
        except MemoryError:
            answer = b'{"limit": "memory"}'
        signal.alarm(0)
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
