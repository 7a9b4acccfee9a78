// The panels of metrics: which metrics, and how they are drawn.

// Of a run: [steps, values] of the training records that have the metric. Step 0 is the policy before training.
function pointsOf(run, name) {
  const values = run.metrics[name];
  if (!values) return [[], []];
  const steps = run.metrics.step;
  const warm = run.metrics["warm_start/step"] ?? [];
  const lastWarm = warm.reduce((most, value) => (isPresent(value) ? Math.max(most, value) : most), 0);
  const xs = [];
  const ys = [];
  values.forEach((value, index) => {
    const isKept = steps[index] > 0 || (warm[index] ?? 0) === lastWarm;
    if (isPresent(value) && isKept) {
      xs.push(steps[index]);
      ys.push(value);
    }
  });
  return [xs, ys];
}

function warmPointsOf(run, name) {
  const xs = [];
  const ys = [];
  (run.metrics[name] ?? []).forEach((value, index) => {
    if (isPresent(value)) {
      xs.push(run.metrics["warm_start/step"][index]);
      ys.push(value);
    }
  });
  return [xs, ys];
}

function namesLike(runs, pattern) {
  const names = new Set();
  for (const run of runs) for (const name of Object.keys(run.metrics)) if (pattern.test(name)) names.add(name);
  return [...names].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
}

// A panel's metrics are names or patterns of names.
const LEARNING = [
  ["Reward and accuracy", ["reward/mean", "reward/accuracy", "eval/accuracy"]],
  ["Evaluation sets", [/^eval\/.+\/(accuracy|avg@\d+|pass@\d+|maj@\d+)$/]],
  ["Entropy of a token", ["train/entropy"], "log"],
  ["Response length, tokens", ["rollout/response_length_mean", "rollout/response_length_max"]],
  ["Gradient norm", ["train/grad_norm"], "log"],
  ["Loss", ["train/loss", "critic/loss"]],
  ["Learning rate", ["train/lr", "critic/lr"]],
  ["Clipped tokens, KL", ["train/clipped", "train/old_kl", "train/kl"]],
  ["Groups without variance, truncated, failed", ["reward/groups_without_variance", "rollout/truncated", "reward/failed"]],
  ["Episodes: turns and calls", ["episode/turns_mean", "episode/calls_mean", "episode/call_errors"]],
  ["How episodes end", [/^episode\/end\//]],
  ["Dynamic sampling", [/^sampling\//]],
];
const ENGINE_AND_TRAINER = [
  ["Difference of log-probabilities, nats a token", ["rollout/logprob_diff_mean", "rollout/logprob_diff_max", "rollout/logprob_diff_engine_max"], "log"],
  ["KL of the engine from the trainer, nats a token", ["rollout/logprob_kl"], "log"],
  ["Share of tokens with a ratio beyond 0.5 and 2", ["rollout/ratio_far_share"]],
  ["By age of the token, in versions of the weights", [/^rollout\/logprob_diff_age_/], "log"],
  ["By turn of the episode", [/^rollout\/logprob_diff_turn_/], "log"],
  ["By cause, where routing is replayed", ["replay/logprob_diff", "replay/logprob_diff_without"], "log"],
  ["Share of differing experts", ["replay/differing_share"]],
  ["Rollout correction", [/^train\/rollout_correction_[a-z]+$/]],
  ["Rollout correction, by the tokens' age", [/^train\/rollout_correction_.+_(fresh|stale)$/]],
];
const STALENESS = [
  ["Versions between sampling and training", ["stale/token_mean", "stale/token_max", "stale/parts_mean"]],
  ["Rollout buffer", [/^buffer\//]],
];
const SPEED = [
  ["Idle share of the step", ["idle/ranks_share", "idle/engines_share", "idle/reward_workers_share"]],
  ["Idle seconds", ["idle/ranks_s", "idle/engines_s", "rollout/idle_s", "rollout/tail_s", "rollout/waited_s", "checkpoint/waited_s"]],
  ["Training tokens a second", ["speed/train_tokens_per_s"]],
  ["TFLOPS a GPU, model FLOPs utilisation", ["speed/train_tflops_per_gpu", "speed/train_mfu"]],
  ["Imbalance of the engines", ["rollout/imbalance", "rollout/accepted"]],
];
const BUSIEST_OF_LAYER = /^experts\/busiest_layer_\d+$/;
const EXPERTS = [
  ["Busiest expert of any layer, over the mean", ["experts/busiest"]],
  ["Share of the experts without a token", ["experts/unused"]],
];
const RESHARD = [["Seconds of a reshard", ["reshard/seconds", "time/reshard_s"]]];
const RECOVERY = [["Engines, ranks and calls lost", [/^recovery\/.*(lost|restarts|rebuilds|repeats|rank_)/, /workers_replaced$/, /calls_lost$/]]];

// Adds the panels that any run has metrics for. Several runs: a colour for each run, a dash for each metric.
function addPanels(parent, runs, panels) {
  const grid = make("div", { class: "charts" });
  const missing = [];
  for (const [title, metrics, scale] of panels) {
    const names = metrics.flatMap((metric) => (metric instanceof RegExp ? namesLike(runs, metric) : [metric]));
    const kept = names.filter((name) => runs.some((run) => pointsOf(run, name)[0].length));
    if (!kept.length) missing.push(title);
    else addChart(grid, title, () => describeLines(runs, kept, scale));
  }
  if (grid.children.length) parent.append(grid);
  if (missing.length) parent.append(soft(`Not recorded by this run: ${missing.join("; ")}.`));
}

function describeLines(runs, names, scale) {
  const traces = [];
  let smallest = Infinity;
  runs.forEach((run, runIndex) => names.forEach((name, index) => {
    const [xs, ys] = pointsOf(run, name);
    if (!xs.length) return;
    for (const value of ys) smallest = Math.min(smallest, value);
    const isSingleRun = runs.length === 1;
    const shown = isSingleRun ? name : `${run.name}: ${name}`;
    traces.push(isSingleRun ? lineTrace(xs, ys, shown, index) : lineTrace(xs, ys, shown, runIndex, index));
  }));
  return [traces, { showlegend: true, yaxis: scale === "log" && smallest > 0 ? { type: "log" } : {} }];
}

function addWarmStart(parent, runs) {
  const names = namesLike(runs, /^warm_start\//).filter((name) => name !== "warm_start/step");
  if (!names.length) return;
  parent.append(make("h3", { text: "Warm start" }));
  const grid = make("div", { class: "charts" });
  for (const name of ["warm_start/loss", "warm_start/entropy", "warm_start/grad_norm"].filter((name) => names.includes(name))) {
    addChart(grid, name, () => [
      runs.map((run, index) => lineTrace(...warmPointsOf(run, name), run.name, index)),
      { showlegend: runs.length > 1, xaxis: { title: { text: "step of the warm start" } } },
    ]);
  }
  parent.append(grid);
}

// Seconds of the phases of each step, one on the other.
function describePhases(run) {
  const isOfSteps = (name) => pointsOf(run, name)[0].some((step) => step > 0);
  // in the order in which the phases were timed
  const names = Object.keys(run.metrics).filter((name) => /^time\/.+_s$/.test(name) && name !== "time/step_s" && isOfSteps(name));
  const steps = pointsOf(run, "time/step_s")[0].filter((step) => step > 0);
  const place = new Map(steps.map((step, index) => [step, index]));
  const isLong = steps.length > 150;
  const traces = names.map((name, index) => {
    const seconds = new Array(steps.length).fill(0);
    const [xs, ys] = pointsOf(run, name);
    xs.forEach((step, at) => { if (place.has(step)) seconds[place.get(step)] = ys[at]; });
    const shared = { x: steps, y: seconds, name: label(name.slice(5, -2)) };
    const colour = COLOURS[index % COLOURS.length];
    return isLong
      ? { ...shared, type: "scatter", mode: "lines", stackgroup: "phases", line: { width: 0.5, color: colour } }
      : { ...shared, type: "bar", marker: { color: colour } };
  });
  return [traces, { barmode: "stack", bargap: 0.1, yaxis: { title: { text: "seconds" } } }];
}

function describeAges(run) {
  const names = namesLike([run], /^stale\/share_/);
  const traces = names.map((name, index) => {
    const [x, y] = pointsOf(run, name);
    const colour = COLOURS[index % COLOURS.length];
    return { type: "bar", x, y, name: `age ${label(name.slice(12))}`, marker: { color: colour } };
  });
  return [traces, { barmode: "stack", bargap: 0.1, yaxis: { title: { text: "share of tokens" } } }];
}

// How often each value came in each range of steps, by samples.jsonl; lines of the means over all samples of a step.
function describeDistribution(run, key, lines) {
  const points = run.samples.filter((sample) => typeof sample[key] === "number" && sample.step > 0);
  const [numColumns, numRows] = [60, 24];
  let [low, high, lastStep] = [Infinity, -Infinity, 1];
  for (const sample of points) {
    low = Math.min(low, sample[key]);
    high = Math.max(high, sample[key]);
    lastStep = Math.max(lastStep, sample.step);
  }
  const width = Math.ceil(lastStep / numColumns);
  const height = (high - low) / (numRows - 1) || 1;
  const columns = Math.ceil(lastStep / width);
  const counts = Array.from({ length: high > low ? numRows : 1 }, () => new Array(columns).fill(0));
  const totals = new Array(columns).fill(0);
  for (const sample of points) {
    const column = Math.floor((sample.step - 1) / width);
    counts[Math.round((sample[key] - low) / height)][column]++;
    totals[column]++;
  }
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const heat = {
    type: "heatmap", name: "share of the samples", showscale: false,
    x: totals.map((_, column) => column * width + (width + 1) / 2),
    y: counts.map((_, row) => low + row * height),
    z: counts.map((row) => row.map((count, column) => (count ? count / totals[column] : null))),
    zmin: 0, zmax: 1,
    colorscale: isDark ? [[0, "#223247"], [1, "#8fc0ff"]] : [[0, "#dce8f8"], [1, "#1f5fbf"]],
    hovertemplate: "step %{x}: %{y:.4g}, share %{z:.2f}<extra></extra>",
  };
  const means = lines.map(([name, shown], index) => lineTrace(...pointsOf(run, name), shown, index + 1)).filter((trace) => trace.x.length);
  return [points.length ? [heat, ...means] : means, { hovermode: "closest", showlegend: true }];
}

function describeReshard(run) {
  const names = ["reshard/wire_bytes", "reshard/inter_node_bytes", "reshard/local_bytes", "reshard/extra_bytes"];
  const traces = names.map((name, index) => lineTrace(...pointsOf(run, name), name, index)).filter((trace) => trace.x.length);
  if (isPresent(run.minimum_wire_bytes) && traces.length) {
    const ends = [Math.min(...traces[0].x), Math.max(...traces[0].x)];
    const minimum = [run.minimum_wire_bytes, run.minimum_wire_bytes];
    traces.push(lineTrace(ends, minimum, "least wire bytes of any plan", 6, 1));
  }
  return [traces, { yaxis: { rangemode: "tozero", exponentformat: "SI", ticksuffix: "B" } }];
}

// Bytes before and after each phase is entered, the most of all steps, beside the plan's.
function describeMemory(run) {
  const phases = [...new Set([...namesLike([run], /^memory\/(before|after)_.+_bytes$/).map((name) => name.replace(/^memory\/(before|after)_(.+)_bytes$/, "$2")), ...Object.keys(run.planned_memory)])];
  const most = (name) => pointsOf(run, name)[1].reduce((largest, value) => Math.max(largest, value), 0) / 2 ** 30 || null;
  const total = (parts) => Object.values(parts ?? {}).reduce((sum, bytes) => sum + bytes, 0) / 2 ** 30 || null;
  const traces = [
    ["entering, before", phases.map((phase) => most(`memory/before_${phase}_bytes`))],
    ["entering, after", phases.map((phase) => most(`memory/after_${phase}_bytes`))],
    ["plan, fullest GPU", phases.map((phase) => total(run.planned_memory[phase]))],
  ].filter(([, values]) => values.some(isPresent));
  return [
    traces.map(([name, y], index) => ({ type: "bar", x: phases.map(label), y, name, marker: { color: COLOURS[index] } })),
    { barmode: "group", xaxis: { title: { text: "phase" } }, yaxis: { title: { text: "GiB" } } },
  ];
}

// The busiest expert of each layer by step, over the layer's mean.
function describeBusiest(run) {
  const names = namesLike([run], BUSIEST_OF_LAYER);
  const steps = [...new Set(names.flatMap((name) => pointsOf(run, name)[0]))].sort((a, b) => a - b);
  const z = names.map((name) => {
    const [xs, ys] = pointsOf(run, name);
    const values = new Map(xs.map((step, index) => [step, ys[index]]));
    return steps.map((step) => values.get(step) ?? null);
  });
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  return [
    [{
      type: "heatmap", x: steps, y: names.map((name) => `layer ${label(name.replace(/.*_/, ""))}`), z, zmin: 1, colorbar: { thickness: 10 },
      colorscale: isDark ? [[0, "#1c2229"], [1, "#82b1ff"]] : [[0, "#f6f8fa"], [1, "#1f5fbf"]],
      hovertemplate: "step %{x}, %{y}: %{z:.3g} times the mean<extra></extra>",
    }],
    { hovermode: "closest", yaxis: { autorange: "reversed" } },
  ];
}

function describeExperts(load) {
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  return [
    [{
      type: "heatmap", z: load, zmin: 0, zmax: 2, colorbar: { thickness: 10 },
      colorscale: isDark ? [[0, "#ff8a80"], [0.5, "#1c2229"], [1, "#82b1ff"]] : [[0, "#b3261e"], [0.5, "#f6f8fa"], [1, "#1f5fbf"]],
      hovertemplate: "layer %{y}, expert %{x}: %{z:.3g} of the mean<extra></extra>",
    }],
    { hovermode: "closest", xaxis: { title: { text: "expert" } }, yaxis: { title: { text: "layer with experts" }, autorange: "reversed" } },
  ];
}
