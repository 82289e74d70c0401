"""The faults and bad inputs of `benchmarks.faults`, as commands of bash, and how they should end."""

from typing import NamedTuple

CONFIG = """
model: {type: qwen3_moe, hidden_dim: 16, num_layers: 2, num_heads: 2, num_kv_heads: 1,
        experts: {num_experts: 2, experts_per_token: 1, intermediate_dim: 8}}
remat: nested
data: {sources: {text: {paths: ["ROOT/text/*.txt"]}}, cache_dir: ROOT/cache,
       held_out_fraction: 0.3, seq_len: 16, batch_size: 4}
optimizer: {learning_rate: 0.02, warmup: 2}
trainer: {num_steps: 150, log_every: 1, eval_every: 40, eval_batches: 2, mesh: {axes: {data: 1}},
          checkpoint: {every_steps: 5}}
"""
IMPOSSIBLE = 99
"""The status of a case that this machine or user can't make."""

# $root has the uninterrupted run, in `whole`, its config.yaml, its text and its cache. Commands are run in
# $own, the folder of the case, with the arguments of a run in $own/run.
FUNCTIONS = f"""
given=("$@")
command() {{ "$python" -m "models.$1" "${{@:2}}"; }}
train() {{ command train_lm "${{given[@]}}" "$@"; }}
configured() {{ given[1]=$own/case.yaml; cat >case.yaml; train "$@"; }}
copy() {{
    cp -r "$root/whole" run
    rm run/result.json
    sed -i "s|$root/whole|$own/run|g" run/config.yaml
}}
damaged() {{ # filters a file of the run to resume, which must not change it
    copy
    "${{@:2}}" <"$1" >damaged
    cp damaged "$1"
    train
    local status=$?
    cmp -s damaged "$1" || echo "error: $1 was written to"
    return $status
}}
flipped() {{ # flips a bit of every 256th byte of files of the run
    copy
    "$python" - $1 <<EOF
import pathlib, sys
for path in map(pathlib.Path, sys.argv[1:]):
    content = bytearray(path.read_bytes())
    content[::256] = bytes(byte ^ 1 for byte in content[::256])
    path.write_bytes(content)
EOF
}}
disk() {{
    mount -t tmpfs -o "$1" tmpfs "$own" 2>/dev/null || exit {IMPOSSIBLE}
    trap 'cd / && umount "$own"' EXIT
    cd "$own"
}}
signalled() {{ # sends a signal once a condition holds
    set -m
    {{ exec "$python" -m models.train_lm "${{given[@]}}" --data.cache_dir "$own/cache"; }} &
    set +m
    until "${{@:2}}" 2>/dev/null || ! kill -0 $!; do sleep 0.005; done
    kill "-$1" $!
    wait $!
}}
handles_signals() {{ # has its own handler of SIGTERM, which it sets before it imports modules
    [ -e /proc/self/status ] || exit {IMPOSSIBLE}
    ((0x$(sed -n 's/^SigCgt:\\t//p' /proc/$!/status) >> 14 & 1))
}}
tokenizes() {{ [ -e cache ] && sleep "${{1-0}}"; }}
has_done_steps() {{ [ "$(wc -l <run/metrics.jsonl)" -gt 2 ]; }}
"""


class Case(NamedTuple):
    """A fault or a bad input.

    Attributes:
        name: of the case.
        commands: cause the fault and run the command, whose status is theirs.
        message: part of the command's message.
        status: the exit status.
    """

    name: str
    commands: str
    message: str
    status: int = 1

    def ends_well(self, status: int, output: str) -> bool:
        """Whether the command ended with the status and the message, and no other."""
        one_message = output.count("error: ") == (self.status == 1)
        return status == self.status and one_message and "Traceback" not in output and self.message in output


_ARRAYS = "run/checkpoints/{}/state/ocdbt*/d/*"
_CHANGED = "--trainer.checkpoint.accept_changes true --trainer.num_steps 160"
_FITS = "This can't fit"
_LAYERS = "at most 10000 are supported"
_NEWEST = f"flipped '{_ARRAYS.format(150)}'"
CASES = [
    Case("a number for a section", "configured --trainer.seed 3 <<< 'trainer: 5'", "has no keys"),
    Case(
        "an included text for a section",
        "echo some text >note.txt; configured --trainer.seed 3 <<< 'trainer: !include note.txt'",
        "has no keys",
    ),
    Case("an unknown key", "train --trainer.num_step 3", "num_steps"),
    Case("an empty config", "configured </dev/null", "case.yaml is empty"),
    Case("half a config", 'head -c 80 "$root/config.yaml" | configured', "case.yaml"),
    Case("a config that is not UTF-8", r"printf 'trainer: \xff' | configured", "utf-8"),
    Case("a config of 100,000 levels", "printf '[%.0s' {1..100000} | configured", "recursion depth"),
    Case("no such text", "train --data.sources.text.paths '[nowhere/*]'", "nowhere/*"),
    Case("a cut of more layers than there are", "train --remat '{nested: [7, 9]}'", "remat"),
    Case("names that no layer has", "train --remat '{save_block_internals: [scoers]}'", "scoers"),
    Case("hidden_dim 200,000", "train --model.hidden_dim 200000", _FITS),
    Case("10**8 layers", "train --model.num_layers 100000000", _LAYERS),
    Case("10**8 layers, planned", 'command plan_lm "${given[@]}" --model.num_layers 100000000', _LAYERS),
    Case("a vocabulary of 10**11", "train --vocab_size 100000000000", _FITS),
    Case(
        "10**9 new tokens",
        'command generate --run_dir "$root/whole" --prompt a --max_new_tokens 1000000000',
        "--max_new_tokens",
    ),
    Case("3 * 10**9 tokens in a sequence", "train --data.seq_len 3000000000", "at most 2,147,483,647"),
    Case("a run folder that is a file", "echo mine >run; train", "/run: "),
    Case("a run folder below a file", f"train --trainer.run_dir {__file__}/run", "fault_cases.py"),
    Case("a name that is too long", "train --trainer.run_dir /tmp/$(printf 'x%.0s' {1..300})", "too long"),
    Case("no permission", f"[ $EUID != 0 ] || exit {IMPOSSIBLE}; chmod 500 .; train", "Permission denied"),
    Case("a file system that is read-only", "disk ro; train", "Read-only file system"),
    Case("a full disk, while a checkpoint is written", "disk size=600k; train", "No space left on device"),
    Case("a limit on the size of files", "ulimit -f 39; train", "File too large"),
    Case("an empty config.yaml in the run", "damaged run/config.yaml true", "config.yaml is empty"),
    Case("half a config.yaml in the run", "damaged run/config.yaml head -c 99", "run/config.yaml"),
    Case("a config.yaml that is not UTF-8", r"damaged run/config.yaml sed '1s/^/\xff/'", "utf-8"),
    Case("damaged metrics", r"damaged run/metrics.jsonl sed '1s/^/\x00\n/'", "line 1 is not a line"),
    Case(
        "a flipped byte in the arrays of a checkpoint",
        f"flipped '{_ARRAYS.format('*')}'; train {_CHANGED}",
        "/run/",
    ),
    Case(
        "a damaged checkpoint to export",
        f'{_NEWEST}; command export_hf --run_dir "$own/run" --out "$own/out"',
        "checkpoints/150",
    ),
    Case(
        "a damaged checkpoint to generate from",
        f'{_NEWEST}; command generate --run_dir "$own/run" --prompt a',
        "checkpoints/150",
    ),
    Case("no run to generate from", 'command generate --run_dir "$own" --prompt a', "run folder"),
    Case("no model to generate from", 'command generate --model "$own/none" --prompt a', "none"),
    Case("no run to export", 'command export_hf --run_dir "$own" --out "$own/out"', "not a run folder"),
    Case(
        "an export onto something", 'command export_hf --run_dir "$root/whole" --out "$root/whole"', "whole"
    ),
    Case("SIGINT during imports", "signalled INT handles_signals", "while the program was", 75),
    Case("SIGINT before the first step", "signalled INT tokenizes", "before a step was done", 75),
    Case("SIGTERM before the first step", "signalled TERM tokenizes 0.5", "by SIGTERM", 75),
    Case("SIGINT after the first step", "signalled INT has_done_steps", "--trainer.run_dir", 75),
    Case("SIGTERM after the first step", "signalled TERM has_done_steps", "--trainer.run_dir", 75),
    Case(
        "standard output is closed",
        "train | head -n 1 >/dev/null; status=${PIPESTATUS[0]}\n"
        "[ -e run/result.json ] && echo finished; exit $status",
        "finished",
        0,
    ),
]
