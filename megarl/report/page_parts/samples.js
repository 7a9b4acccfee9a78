// The sample browser: filters, a list of which only the visible rows exist, and one sample in full.

const ROW_PX = 52; // as .sample in page.css
const ROWS_BEYOND = 6; // above and below what is visible
const TURN_MS = 10; // of work in a turn, where the browser does not say how long it is idle
const TEXTS = { finished: "finished", open: "cut at a limit" };

function endOf(sample) {
  if (sample.end) return sample.end;
  return sample.finished === false ? TEXTS.open : TEXTS.finished;
}

function searchText(sample) {
  const turns = (Array.isArray(sample.turns) ? sample.turns : []).map((turn) => turn.text);
  return [sample.prompt, sample.response, sample.answer, ...turns].join("\n").toLowerCase();
}

function mark(text, background) {
  const element = make("span", { class: "mark", text });
  element.style.background = background;
  return element;
}

// Blue above 0, red below, stronger towards the largest.
function signedColour(value, largest) {
  const share = largest ? Math.min(1, Math.abs(value) / largest) : 0;
  return `rgba(${value < 0 ? "217, 75, 60" : "59, 125, 216"}, ${0.08 + 0.5 * share})`;
}

// Neighbouring versions have hues far from each other.
function versionColour(version) {
  return `hsla(${(version * 137.5) % 360}, 60%, 50%, 0.3)`;
}

// Calls with a function that says whether there is time left. Safari may have no requestIdleCallback.
function whenIdle(act) {
  if (globalThis.requestIdleCallback) {
    requestIdleCallback((idle) => act(() => idle.timeRemaining() > 1));
    return;
  }
  setTimeout(() => {
    const end = performance.now() + TURN_MS;
    act(() => performance.now() < end);
  });
}

class SampleBrowser {
  constructor(parent, samples) {
    this.samples = samples;
    this.texts = []; // in lower case, for searches; made while the browser is idle, or by a search
    this.kept = samples;
    this.largest = samples.reduce((most, sample) => Math.max(most, Math.abs(sample.advantage ?? 0)), 0);
    this.chosen = null;
    this.controls = this.makeControls();
    this.count = soft("");
    this.space = make("div", { class: "space" });
    this.list = make("div", { class: "list", role: "list", "aria-label": "Samples" }, this.space);
    this.detail = make("div", { class: "detail", "aria-live": "polite" });
    this.list.addEventListener("scroll", () => this.showRows(), { passive: true });
    parent.append(make("div", { class: "filters" }, ...Object.values(this.controls).map((control) => control.parentElement)), this.count,
      make("div", { class: "browser" }, this.list, this.detail));
    this.filter();
    if (this.kept.length) this.choose(this.kept[0]);
    this.prepareTexts();
  }

  prepareTexts() {
    whenIdle((isTimeLeft) => {
      while (isTimeLeft() && this.texts.length < this.samples.length) this.prepareText();
      if (this.texts.length < this.samples.length) this.prepareTexts();
    });
  }

  prepareText() {
    this.texts.push(searchText(this.samples[this.texts.length]));
  }

  makeControls() {
    const changed = { on: { input: () => this.filter() } };
    const field = (title, control) => { make("label", {}, title, control); return control; };
    const number = (title) => field(title, make("input", { type: "number", step: "any", ...changed }));
    const choice = (title, values) => field(title, make("select", { ...changed }, make("option", { value: "", text: "all" }),
      ...values.map((value) => make("option", { value, text: value }))));
    const distinct = (read) => [...new Set(this.samples.map(read).filter(isPresent))].map(String).sort();
    const controls = {
      search: field("text", make("input", { type: "search", ...changed })),
      firstStep: number("from step"), lastStep: number("to step"),
      least: number("reward from"), most: number("reward to"),
      end: choice("end", distinct(endOf)),
      correct: choice("correct", distinct((sample) => sample.correct)),
    };
    const sources = distinct((sample) => sample.source);
    if (sources.length) controls.source = choice("source", sources);
    controls.order = field("order", make("select", { ...changed }, ...[["step", "step"], ["reward", "lowest reward"], ["-reward", "highest reward"],
      ["-length", "longest"], ["-advantage", "highest advantage"], ["advantage", "lowest advantage"]].map(([value, text]) => make("option", { value, text }))));
    return controls;
  }

  // What the reader has set, for a page that is built anew.
  state() {
    const values = Object.entries(this.controls).map(([name, control]) => [name, control.value]);
    return { values, top: this.list.scrollTop, chosen: this.chosen };
  }

  restore(state) {
    for (const [name, value] of state.values) if (this.controls[name]) this.controls[name].value = value;
    this.filter();
    const chosen = state.chosen;
    const same = chosen && this.samples.find((sample) => ["step", "group", "sample"].every((key) => sample[key] === chosen[key]));
    if (same) this.choose(same);
    this.list.scrollTop = state.top;
  }

  filter() {
    const began = performance.now();
    const value = (name) => this.controls[name]?.value ?? "";
    const limit = (name, otherwise) => (value(name) === "" ? otherwise : Number(value(name)));
    const words = value("search").toLowerCase();
    while (words && this.texts.length < this.samples.length) this.prepareText();
    const [firstStep, lastStep] = [limit("firstStep", -Infinity), limit("lastStep", Infinity)];
    const [least, most] = [limit("least", -Infinity), limit("most", Infinity)];
    const [end, correct, source] = [value("end"), value("correct"), value("source")];
    this.kept = this.samples.filter((sample, index) =>
      sample.step >= firstStep && sample.step <= lastStep
      && ((sample.reward ?? NaN) >= least || least === -Infinity) && ((sample.reward ?? NaN) <= most || most === Infinity)
      && (!end || endOf(sample) === end) && (!correct || String(sample.correct) === correct)
      && (!source || String(sample.source) === source) && (!words || this.texts[index].includes(words)));
    this.sort(value("order"));
    this.count.textContent = `${this.kept.length} of ${this.samples.length} samples`;
    this.space.style.height = `${this.kept.length * ROW_PX}px`;
    this.list.scrollTop = 0;
    this.showRows();
    this.filterMs = performance.now() - began;
  }

  sort(order) {
    if (!order || order === "step") return;
    const sign = order.startsWith("-") ? -1 : 1;
    const key = order.replace("-", "");
    const number = (sample) => (isPresent(sample[key]) ? sign * sample[key] : Infinity);
    this.kept = [...this.kept].sort((a, b) => number(a) - number(b));
  }

  showRows() {
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW_PX) - ROWS_BEYOND);
    const count = Math.ceil(this.list.clientHeight / ROW_PX) + 2 * ROWS_BEYOND;
    const rows = this.kept.slice(first, first + count).map((sample, index) => this.row(sample, first + index));
    this.space.replaceChildren(...rows);
  }

  row(sample, index) {
    const head = make("div", { class: "head" }, make("span", { class: sample.correct ? "good" : "bad", text: sample.correct ? "✓ " : "✗ " }),
      `step ${sample.step} · ${sample.group}.${sample.sample} · reward ${shortNumber(sample.reward)} · `);
    if (isPresent(sample.advantage)) head.append(mark(`adv ${shortNumber(sample.advantage, 3)}`, signedColour(sample.advantage, this.largest)), " ");
    if (isPresent(sample.version)) head.append(mark(`v${sample.version}`, versionColour(sample.version)));
    head.append(` · ${sample.length} tokens · ${endOf(sample)}`);
    const text = `${sample.prompt} → ${sample.response}`.slice(0, 300);
    const row = make("button", { class: sample === this.chosen ? "sample chosen" : "sample", role: "listitem", on: { click: () => this.choose(sample) } },
      head, make("div", { class: "text", text }));
    row.style.top = `${index * ROW_PX}px`;
    return row;
  }

  choose(sample) {
    this.chosen = sample;
    this.showRows();
    this.detail.replaceChildren(...sampleInFull(sample));
    this.detail.scrollTop = 0;
  }
}

function sampleInFull(sample) {
  const shown = new Set(["prompt", "response", "answer", "turns", "rows", "row"]);
  const facts = Object.entries(sample).filter(([name, value]) => !shown.has(name) && isPresent(value));
  const chips = facts.map(([name, value]) => make("span", { class: "chip" }, make("span", { class: "soft", text: `${name} ` }),
    make("b", { text: typeof value === "object" ? JSON.stringify(value) : shortNumber(value) })));
  const parts = [make("div", { class: "chips" }, ...chips), make("h3", { text: "prompt" }), make("pre", { text: sample.prompt })];
  if (sample.answer) parts.push(make("h3", { text: "right answer, as the reward function gets it" }), make("pre", { text: sample.answer }));
  if (Array.isArray(sample.turns)) parts.push(make("h3", { text: "turns" }), ...sample.turns.map(turnInFull));
  else parts.push(make("h3", { text: "response" }), make("pre", { text: sample.response }));
  if (sample.rows) parts.push(...tokensInFull(sample.rows));
  return parts;
}

const DARKEST_LOGP = 8; // nats, of a token that the engine hardly expected
const DARKEST_DIFF = 0.5; // nats, of a token about which engine and trainer differ

function differenceAt(row, index) {
  return row.trainer_logp ? row.logp[index] - row.trainer_logp[index] : null;
}

// By title, the colour of a sampled token.
const TOKEN_COLOURS = {
  "engine minus trainer": (row, index) => signedColour(differenceAt(row, index), DARKEST_DIFF),
  "engine's log-probability": (row, index) => `rgba(217, 102, 59, ${Math.min(0.75, -row.logp[index] / DARKEST_LOGP)})`,
  "version of the weights": (row, index, version) => versionColour(version),
};

// The tokens of each row, coloured by what the reader chooses.
function tokensInFull(rows) {
  const titles = Object.keys(TOKEN_COLOURS).filter((title) => !title.endsWith("trainer") || rows.every((row) => row.trainer_logp));
  const choice = make("select", {}, ...titles.map((text) => make("option", { value: text, text })));
  const holders = rows.map(() => make("pre", { class: "tokens" }));
  const show = () => rows.forEach((row, index) => holders[index].replaceChildren(...tokenSpans(row, TOKEN_COLOURS[choice.value])));
  choice.addEventListener("change", show);
  show();
  return [make("h3", { text: "tokens" }), make("div", { class: "filters" }, make("label", {}, "colour", choice)), ...holders];
}

function tokenSpans(row, colour) {
  const versions = row.parts.flatMap(([version, count]) => new Array(Math.min(count, row.tokens.length)).fill(version));
  const spans = row.tokens.map((text, index) => {
    const isSampled = row.trained[index];
    const difference = differenceAt(row, index);
    const ofTrainer = difference === null ? "" : `, the trainer's ${row.trainer_logp[index]} (difference ${shortNumber(difference, 2)})`;
    const tooltip = isSampled ? `logprob ${row.logp[index]}${ofTrainer}, version ${versions[index]}` : "not sampled by the model";
    const span = make("span", { class: isSampled ? "" : "other", text, title: tooltip });
    if (isSampled) span.style.background = colour(row, index, versions[index]);
    return span;
  });
  const numLeft = row.parts.reduce((sum, [, count]) => sum + count, 0) - row.tokens.length;
  if (numLeft > 0) spans.push(soft(` … ${numLeft} more tokens are not in the file (run.sample_log_tokens)`));
  return spans;
}

function turnInFull(turn) {
  const reward = turn.reward ? `, reward ${shortNumber(turn.reward)}` : "";
  const whole = make("div", { class: turn.role === "assistant" ? "turn assistant" : "turn" },
    soft(`${turn.role}${reward}`), make("pre", { text: turn.text }));
  for (const call of Array.isArray(turn.calls) ? turn.calls : []) {
    const given = typeof call.arguments === "string" ? call.arguments : JSON.stringify(call.arguments);
    whole.append(make("div", { class: "call" },
      soft(`call of ${call.name ?? "(not readable)"}${call.error ? `: ${call.error}` : ""}`),
      make("pre", { text: given }), soft("result"), make("pre", { text: call.result })));
  }
  return whole;
}
