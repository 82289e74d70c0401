"use strict";
// Memory of a stack of layers: the schedules of stacked_remat/_schedule.py, and bytes from them. Sizes are in bytes.

const calculator = (() => {
  const BYTES = { bfloat16: 2, float16: 2, float32: 4 };
  // GiB of one device, rounded down: those of memory.TARGETS, with which a test compares them.
  const MEMORY = { h200: 139, "a100-80gb": 79, h100: 79, b200: 178, v5p: 95, v5e: 16, v6e: 32 };
  const REPLAYS_AT_MOST = 2e6; // layers, which a browser counts without delay
  const isTpu = (target) => target.startsWith("v");

  // ---- schedules: as in stacked_remat/_schedule.py, with which a test compares them ----

  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const range = (start, stop) => Array.from({ length: Math.max(0, stop - start) }, (_, i) => start + i);

  function choose(n, k) {
    let found = 1;
    for (let i = 1; i <= k; i++) found = (found * (n - k + i)) / i;
    return Math.round(found);
  }

  const units = (part) => range(part.start, part.stop).map((layer) => ({ start: layer, stop: layer + 1 }));

  /** Follows `cut` down to single layers, always at the top of a stack of parts whose first input is held. */
  function build(length, cut, key) {
    const stack = [{ start: 0, stop: length, key }];
    const size = (part) => part.stop - part.start;
    const runs = [];
    let slots = 1;
    while (stack.length) {
      const start = stack[stack.length - 1].start;
      const slot = stack.length - 1;
      while (size(stack[stack.length - 1]) > 1) stack.push(...cut(stack.pop()));
      slots = Math.max(slots, stack.length);
      const writes = [];
      for (let held = slot + 1; held < stack.length; held++) {
        while (start + writes.length < stack[held].start) writes.push(held);
      }
      let visits = 0;
      while (stack.length && size(stack[stack.length - 1]) === 1) {
        stack.pop();
        visits += 1;
      }
      runs.push({ start, slot, writes, visits });
    }
    const first = runs[0];
    const count = first.writes.length;
    const forward = [0, ...first.writes];
    runs[0] = { start: count, slot: count ? first.writes[count - 1] : 0, writes: [], visits: first.visits };
    return { length, slots, forward, runs, segments: [] };
  }

  function once(length, sizes) {
    const cut = (part) => {
      if (part.key === 1) return units(part);
      let start = 0;
      return sizes.map((size) => ({ start, stop: (start += size), key: 1 }));
    };
    const schedule = build(length, cut, 0);
    const last = sizes.length - 1;
    if (new Set(sizes).size === 1 && sizes.length > 1 && sizes[0] > 1) {
      const start = length - sizes[last];
      schedule.runs[0] = { start, slot: last, writes: range(last + 1, last + sizes[0]), visits: sizes[0] };
    }
    return { ...schedule, segments: sizes };
  }

  function shrinking(length) {
    let slots = 1;
    while ((slots * (slots + 1)) / 2 < length) slots += 1;
    const sizes = [];
    while (sum(sizes) < length) sizes.push(Math.min(slots - sizes.length, length - sum(sizes)));
    return once(length, sizes);
  }

  function equal(length, segments) {
    const parts = Math.min(segments, length);
    const longer = length % parts;
    return once(length, range(0, parts).map((j) => Math.floor(length / parts) + (j < longer ? 1 : 0)));
  }

  function bounded(length, carries) {
    if (carries < 2 && length > 1) throw new Error("max_carries is at least 2");
    // A layer is replayed at most `most` times.
    let most = 1;
    while (most * length <= REPLAYS_AT_MOST && choose(carries - 1 + most, most) < length) most += 1;
    if (most * length > REPLAYS_AT_MOST) throw new Error(`a larger k for ${length} layers: max_carries=${carries} is too few to show`);
    const cut = (part) => {
      const size = part.stop - part.start;
      const slots = part.key;
      if (size <= slots) return units(part);
      let repeats = 1;
      while (choose(slots - 1 + repeats, repeats) < size) repeats += 1;
      const most = choose(slots + repeats - 2, repeats - 1);
      const least = choose(slots + repeats - 3, repeats - 1);
      const middle = part.start + Math.min(most, size - least);
      return [
        { start: part.start, stop: middle, key: slots },
        { start: middle, stop: part.stop, key: slots - 1 },
      ];
    };
    return build(length, cut, carries);
  }

  /** The schedule of a policy for `length` layers: `ScanCheckpointPolicy.schedule`. */
  function scheduleOf(policy, length) {
    if (policy.max_carries) return bounded(length, Math.min(policy.max_carries, length));
    if (policy.nested === true && policy.offload) return equal(length, Math.ceil(Math.sqrt(length)));
    if (policy.nested === true) return shrinking(length);
    if (policy.nested) return equal(length, policy.nested);
    return equal(length, length);
  }

  const replaysOf = (schedule) => sum(schedule.runs.map((run) => run.writes.length));

  /**
   * When each carry is held, in steps of one layer: `{slot, layer, from, to}`, from its write to its last read.
   * `phases` are `{kind, layer, at}`: one `forward`, `replay` or `visit` a step.
   */
  function lifetimes(schedule) {
    const phases = [];
    const held = [];
    const open = new Map();
    const write = (slot, layer, at) => open.set(slot, { slot, layer, from: at, to: null });
    const read = (slot, at) => {
      const value = open.get(slot);
      if (value.to === null) held.push(value);
      value.to = at + 1;
    };
    schedule.forward.forEach((slot, layer) => {
      write(slot, layer, phases.length);
      phases.push({ kind: "forward", layer, at: phases.length });
    });
    for (const run of schedule.runs) {
      if (run.writes.length) read(run.slot, phases.length);
      run.writes.forEach((slot, k) => {
        phases.push({ kind: "replay", layer: run.start + k, at: phases.length });
        write(slot, run.start + k + 1, phases.length);
      });
      const top = run.writes.length ? run.writes[run.writes.length - 1] : run.slot;
      for (let k = 0; k < run.visits; k++) {
        read(top - k, phases.length);
        phases.push({ kind: "visit", layer: run.start + run.writes.length - k, at: phases.length });
      }
    }
    held.sort((a, b) => a.slot - b.slot || a.from - b.from);
    return { phases, held };
  }

  // ---- bytes ----

  /**
   * What a stack takes for one gradient or one update.
   *
   * `input` has `layers`, `tokens`, `width`, `dtype`, `target` (a name of `TARGETS`), `policy`, and either
   * - `inner`, the inner width of each layer of the pattern's cycle, for a residual MLP; with `weights`, numbers in
   *   a layer, if they are not 2 * width * inner; `update`: "gradient", "frozen" or "fused"; `state`, bytes of
   *   optimizer state for a weight; `other`, bytes of all that is not the stack; or
   * - `reported`, what a report of one's own model says under `True`: `temporaries`, and `constant`, its arguments and
   *   outputs.
   */
  function estimate(input) {
    const { layers, width, policy } = input;
    const bytes = BYTES[input.dtype];
    const carry = input.tokens * width * bytes;
    const first = Math.min(policy.first_layers || 0, layers);
    const rest = layers - first;
    const cut = Boolean(policy.nested || policy.max_carries);
    const everything = Boolean(policy.save_block_internals);
    const schedule = rest ? scheduleOf(policy, rest) : null;
    const kinds = input.inner || [0];
    const kindOf = (layer) => layer % kinds.length;
    const internals = kinds.map((inner) => input.tokens * inner * bytes);
    const weightsOf = kinds.map((inner) => (input.weights || 2 * width * inner) * bytes);

    let held = first;
    let onHost = 0;
    if (schedule && policy.offload) {
      held += cut ? Math.max(...schedule.segments) : 0;
      onHost = schedule.segments.length;
    } else if (schedule) {
      held += schedule.slots;
    }
    // The derivative of x + silu(x @ up) @ down reads four arrays of the inner width.
    const keeps = everything ? layers : first;
    const saved = 4 * sum(range(0, keeps).map((layer) => internals[kindOf(layer)]));
    const weights = sum(range(0, layers).map((layer) => weightsOf[kindOf(layer)]));
    const stack = {
      weights,
      gradients: (input.update || "gradient") === "gradient" ? weights : 0,
      optimizer: (weights / bytes) * (input.state || 0),
      ends: 2 * carry,
      other: input.other || 0,
    };
    const { reported } = input;
    const parts = {
      ...(reported ? { weights: 0, gradients: 0, optimizer: 0, ends: 0, other: reported.constant } : stack),
      carries: held * carry,
      saved: reported && keeps ? NaN : saved,
      internals: reported
        ? reported.temporaries - layers * carry
        : visitOf(input, internals, weightsOf, carry, cut && !first ? schedule : null),
    };
    const replays = schedule ? (cut && policy.offload ? rest - schedule.segments.length : replaysOf(schedule)) : 0;
    const recomputed = layers - keeps;
    return {
      ...parts,
      carry,
      held,
      schedule,
      temporaries: parts.carries + parts.saved + parts.internals,
      total: sum(Object.values(parts)),
      host: onHost * carry,
      transfers: 2 * onHost * carry,
      replays,
      evaluations: layers + recomputed + replays,
      arithmetic: (3 * layers + recomputed + replays) / (3 * layers),
    };
  }

  /** What XLA holds while one layer of the residual MLP is reversed, as docs/calculator.md says. */
  function visitOf(input, internals, weightsOf, carry, schedule) {
    const widest = Math.max(...internals);
    if (!isTpu(input.target)) return 2 * widest + carry + Math.max(...weightsOf);
    const kinds = input.inner.length > 1 ? carry : 0;
    if (!schedule || input.update === "frozen") return 2 * widest + carry + kinds;
    return widest + (input.policy.offload ? 1 : 2) * carry + kinds;
  }

  return { MEMORY, shrinking, equal, bounded, scheduleOf, replaysOf, lifetimes, estimate };
})();

if (typeof module !== "undefined") module.exports = calculator;
if (typeof document !== "undefined") document.addEventListener("DOMContentLoaded", showPage);

// ---- the page ----

const GIB = 2 ** 30;
/** Two decimals, or two digits of what is smaller. */
const gib = (bytes) => {
  const number = bytes / GIB;
  return number && number < 0.1 ? number.toPrecision(2) : number.toFixed(2);
};
const HELD_AT_MOST = 12000; // rectangles that a browser draws without delay

/** The policies that the page compares, by the name shown; `k` is the number that belongs to some. */
function policiesOf(k) {
  return {
    "False": { save_block_internals: true },
    "True": {},
    "nested": { nested: true },
    [`nested=${k}`]: { nested: k },
    [`max_carries=${Math.max(2, k)}`]: { max_carries: Math.max(2, k) },
    "offload": { offload: true },
    "nested + offload": { nested: true, offload: true },
  };
}

/** What is wrong in a field of the form. */
class FieldError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

function readForm(form) {
  const value = (name) => form.elements[name].value;
  const whole = (name, smallest) => {
    const number = Number(value(name));
    if (!(Number.isInteger(number) && number >= smallest) || value(name).trim() === "") {
      throw new FieldError(name, `${name} is a whole number, at least ${smallest}`);
    }
    return number;
  };
  const positive = (name) => whole(name, 1);
  const least = (name) => {
    const number = Number(value(name));
    if (!(number >= 0)) throw new FieldError(name, `${name} is a number, at least 0`);
    return number;
  };
  const input = {
    layers: positive("layers"),
    tokens: positive("tokens"),
    width: positive("hidden"),
    dtype: value("dtype"),
    target: value("target"),
    update: value("update"),
    state: least("state"),
    other: least("other") * GIB,
  };
  if (input.layers > 20000) throw new FieldError("layers", "layers is at most 20000 here");
  if (value("block") === "mlp") {
    input.inner = value("pattern").split(",").map(Number);
    if (!input.inner.every((inner) => Number.isInteger(inner) && inner >= 1)) {
      throw new FieldError("pattern", "pattern is inner widths, whole numbers with commas between");
    }
    if (least("weights")) input.weights = least("weights") * 1e6;
  } else {
    input.reported = { temporaries: least("temporaries") * GIB, constant: least("constant") * GIB };
  }
  const first = whole("first_layers", 0);
  if (first > input.layers) throw new FieldError("first_layers", `first_layers is at most the ${input.layers} layers`);
  const policies = policiesOf(positive("k"));
  for (const policy of Object.values(policies)) {
    if (first && !policy.save_block_internals && Object.keys(policy).length) {
      policy.first_layers = first;
    }
  }
  const ofDevice = calculator.MEMORY[input.target];
  form.elements.budget.placeholder = ofDevice; // the budget where none is written
  return { input, policies, budget: (least("budget") || ofDevice) * GIB };
}

/** The parts of an estimate, and what the page calls them. */
const PARTS = [
  ["weights", "weights"],
  ["gradients", "gradients of the weights"],
  ["optimizer", "optimizer state"],
  ["ends", "input and its gradient"],
  ["other", "everything else"],
  ["carries", "carries"],
  ["saved", "internals that are kept"],
  ["internals", "one layer being reversed"],
];

function cells(row, tag, values) {
  for (const value of values) row.appendChild(document.createElement(tag)).textContent = value;
  return row;
}

function fillTable(table, head, rows) {
  table.replaceChildren();
  cells(table.createTHead().insertRow(), "th", head);
  const body = table.createTBody();
  for (const { values, mark } of rows) {
    const row = cells(body.insertRow(), "td", values);
    if (mark) row.className = mark;
  }
}

function showPolicies(table, found, budget, chosen) {
  const fitting = found.filter(({ result }) => result.total <= budget);
  const best = fitting.reduce((a, b) => (a && a.result.arithmetic <= b.result.arithmetic ? a : b), null);
  const rows = found.map(({ name, result }) => ({
    values: [
      name,
      Number.isNaN(result.total) ? "not known" : gib(result.total),
      Number.isNaN(result.total) ? "" : result.total > budget ? "no" : best.name === name ? "yes, fewest FLOPs" : "yes",
      gib(result.host),
      gib(result.transfers),
      result.held,
      result.evaluations,
      result.arithmetic.toFixed(2),
    ],
    mark: name === chosen ? "chosen" : "",
  }));
  const head = ["remat", "peak, GiB", "fits", "host, GiB", "transfers, GiB", "carries"];
  fillTable(table, [...head, "layers run forward", "FLOPs, to False"], rows);
}

function showParts(table, result) {
  const rows = PARTS.filter(([key]) => result[key]).map(([key, label]) => ({
    values: [key === "carries" ? `${result.held} ${result.held === 1 ? "carry" : "carries"} of ${gib(result.carry)} GiB` : label, gib(result[key])],
  }));
  rows.push({ values: ["expected peak", Number.isNaN(result.total) ? "not known" : gib(result.total)], mark: "sum" });
  fillTable(table, ["on the device", "GiB"], rows);
}

const SVG = "http://www.w3.org/2000/svg";

function shape(svg, name, attributes, text) {
  const made = svg.appendChild(document.createElementNS(SVG, name));
  Object.entries(attributes).forEach(([key, value]) => made.setAttribute(key, value));
  made.textContent = text;
  return made;
}

/** Slots over time: a bar for each carry that is held, and below what is computed, with numbers of layers if `unit` is set. */
function draw(svg, schedule, offload, unit = 0) {
  svg.replaceChildren();
  if (!schedule) return;
  const { phases, held } = calculator.lifetimes(schedule);
  if (held.length + phases.length > HELD_AT_MOST) return;
  const wide = unit || 1;
  const bar = (kind, layer, x, y, width, height, title) => {
    const rectangle = shape(svg, "rect", { class: kind, x: x * wide, y, width: width * wide - unit / 20, height }, "");
    shape(rectangle, "title", {}, title);
    if (unit) shape(svg, "text", { x: (x + width / 2) * wide, y: y + 0.75 * height }, layer);
  };
  const starts = new Set();
  let start = 0;
  for (const size of schedule.segments) {
    starts.add(start);
    start += size;
  }
  const row = unit || 10;
  const height = schedule.slots * row;
  svg.setAttribute("viewBox", `0 0 ${phases.length * wide} ${height + 4 + 1.2 * row}`);
  if (!unit) svg.setAttribute("preserveAspectRatio", "none");
  for (const { slot, layer, from, to } of held) {
    const kind = offload && starts.has(layer) ? "host" : "held";
    bar(kind, layer, from, slot * row, to - from, row - 1, `input of layer ${layer}: steps ${from} to ${to}`);
  }
  for (const { kind, layer, at } of phases) bar(kind, layer, at, height + 4, 1, 1.2 * row, `${kind} layer ${layer}`);
}

function showReports(table) {
  const cases = JSON.parse(document.getElementById("reported-memory").textContent);
  const rows = cases.map(({ source, name, input, reported }) => {
    const found = calculator.estimate(input);
    const off = (100 * (found.total / reported.total - 1)).toFixed(1);
    const kept = input.update === "fused" ? "" : gib(found.temporaries);
    const values = [name, input.target, gib(reported.total), gib(found.total), `${off === "-0.0" ? "0.0" : off} %`];
    return { values: [...values, gib(reported.temporaries), kept, source] };
  });
  const head = ["program", "target", "peak: reported", "predicted", "error", "temporaries: reported", "predicted"];
  fillTable(table, [...head, "file"], rows);
}

function showPage() {
  for (const svg of document.querySelectorAll("svg[data-policy]")) {
    const policy = JSON.parse(svg.dataset.policy);
    draw(svg, calculator.scheduleOf(policy, Number(svg.dataset.layers)), policy.offload, 20);
  }
  showCalculator();
}

function showCalculator() {
  const form = document.getElementById("calculator");
  if (!form) return;
  const at = (id) => document.getElementById(id);
  const select = form.elements.policy;
  const markStale = (isStale) => {
    for (const block of document.querySelectorAll(".calculator-tables:has(#calculator-policies, #calculator-parts)")) {
      block.classList.toggle("stale", isStale);
    }
  };
  /** Puts a message below the field that it is about. */
  const showMistake = (field, message) => {
    form.querySelector("[aria-invalid]")?.removeAttribute("aria-invalid");
    if (field) {
      field.setAttribute("aria-invalid", "true");
      field.after(at("calculator-error"));
    }
    at("calculator-error").textContent = message;
  };
  const update = () => {
    try {
      const { input, policies, budget } = readForm(form);
      const index = Math.max(0, select.selectedIndex);
      select.replaceChildren(...Object.keys(policies).map((name) => new Option(name, name)));
      select.selectedIndex = index;
      for (const group of form.querySelectorAll("[data-block]")) {
        group.hidden = group.dataset.block !== form.elements.block.value;
      }
      const found = Object.entries(policies).map(([name, policy]) => {
        try {
          return { name, result: calculator.estimate({ ...input, policy }) };
        } catch (error) {
          return { name, error };
        }
      });
      const { name, result, error } = found[index];
      if (error) throw error;
      showPolicies(at("calculator-policies"), found.filter((one) => one.result), budget, name);
      showParts(at("calculator-parts"), result);
      draw(at("calculator-picture"), result.schedule, policies[name].offload);
      showMistake(null, "");
      markStale(false);
    } catch (error) {
      // A schedule has no name of a field: its k is too small.
      showMistake(form.elements[error.field ?? "k"], error.message);
      markStale(true);
    }
  };
  form.addEventListener("input", update);
  form.addEventListener("submit", (event) => event.preventDefault());
  select.append(...Object.keys(policiesOf(7)).map((name) => new Option(name, name)));
  select.selectedIndex = 2;
  update();
  showReports(at("calculator-reports"));
}
