// What is no chart: the overview, the rank map, the recipe, losses, and any metric by its name.

function addOverview(run) {
  const value = (name) => last(pointsOf(run, name)[1]);
  const steps = run.metrics.step ?? [];
  const cards = [
    ["step", `${last(steps) ?? "-"} of ${run.steps ?? "?"}`],
    ["reward/mean, last", shortNumber(value("reward/mean"))],
    ["eval/accuracy, last", shortNumber(value("eval/accuracy"))],
    ["train/entropy, last", shortNumber(value("train/entropy"))],
    ["rollout/logprob_diff_max, worst", shortNumber(pointsOf(run, "rollout/logprob_diff_max")[1].reduce((most, diff) => Math.max(most, diff), 0) || null)],
    ["seconds of a step, median", shortNumber(median(pointsOf(run, "time/step_s")[1].slice(1)))],
    ["samples shown", String(run.samples.length)],
    ["losses", run.losses ? String(run.losses.length) : "?"],
  ];
  return make("div", { class: "cards" }, ...cards.map(([name, text]) =>
    make("div", { class: "card" }, make("b", { text }), make("span", { class: "soft", text: name }))));
}

function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

function addSigns(parent, run) {
  if (run.signs.length) {
    parent.append(make("h3", { class: "bad", text: "Signs of a sick run" }));
    parent.append(make("ul", { class: "signs" }, ...run.signs.map((text) => make("li", { text }))));
  }
  if (run.notes.length) {
    parent.append(make("h3", { text: "Left out" }));
    parent.append(make("ul", { class: "signs soft" }, ...run.notes.map((text) => make("li", { text }))));
  }
}

function addRankMap(parent, run) {
  if (!run.slots.length) {
    parent.append(soft("The placement is not known: see the notes at the top."));
    return;
  }
  const roles = [...new Set(run.slots.flatMap((slot) => Object.keys(slot.ranks)))];
  const axes = (coords) => coords ? `rank ${coords.rank}: ` + Object.entries(coords).filter(([axis]) => axis !== "rank").map(([axis, at]) => `${axis} ${at}`).join(", ") : "";
  const rows = run.slots.map((slot) => tableRow([
    slot.slot, slot.node, slot.gpu, ...roles.map((role) => axes(slot.ranks[role])),
    isPresent(slot.engine) ? `engine ${slot.engine}, rank ${slot.engine_rank}` : "",
  ]));
  parent.append(table(["slot", "node", "GPU", ...roles, "engine"], rows));
}

function addRecipe(parent, run) {
  if (!run.recipe.length) {
    if (run.recipe_text) parent.append(make("pre", { text: run.recipe_text }));
    else parent.append(soft("This run's folder has no recipe."));
    return;
  }
  const only = make("input", { type: "checkbox", id: "only-differing" });
  only.checked = true;
  const search = make("input", { type: "search", placeholder: "key or value", "aria-label": "Search the recipe" });
  const holder = make("div");
  const show = () => {
    const words = search.value.toLowerCase();
    const kept = run.recipe.filter((key) => (!only.checked || key.differs) && `${key.name} ${key.value}`.toLowerCase().includes(words));
    const rows = kept.map((key) => tableRow(
      [make("code", { text: key.name }), make("code", { text: key.value }), make("code", { text: key.default ?? "(must be set)" })],
      key.differs && isPresent(key.default) && !only.checked ? { class: "differs" } : {}));
    holder.replaceChildren(soft(`${kept.length} of ${run.recipe.length} keys`), table(["key", "value", "default"], rows));
  };
  only.addEventListener("change", show);
  search.addEventListener("input", show);
  parent.append(make("div", { class: "filters" }, search, make("label", { class: "row" }, only, "only what differs from the defaults")), holder);
  show();
}

function addLosses(parent, run) {
  if (!run.losses) {
    parent.append(soft("What was lost is not known: losses.jsonl cannot be read."));
    return;
  }
  if (!run.losses.length) {
    parent.append(soft("No loss is recorded in the run's folder."));
    return;
  }
  const rows = run.losses.map((loss) => tableRow([
    loss.at, loss.what, loss.cause, isPresent(loss.back_after_s) ? shortNumber(loss.back_after_s) : "not back"]));
  parent.append(table(["UTC", "what", "why", "back after, s"], rows));
}

function addAnyMetric(parent, runs) {
  const names = namesLike(runs, /\//);
  const choice = make("select", { "aria-label": "Metric" }, ...names.map((name) => make("option", { value: name, text: name })));
  const scale = make("select", { "aria-label": "Scale" }, make("option", { value: "", text: "linear" }), make("option", { value: "log", text: "logarithmic" }));
  const grid = make("div", { class: "charts" });
  parent.append(make("div", { class: "filters" }, choice, scale), grid);
  if (!names.length) return;
  const plot = addChart(grid, "by step", () => describeLines(runs, [choice.value], scale.value));
  for (const control of [choice, scale]) control.addEventListener("change", () => drawChart(plot));
}
