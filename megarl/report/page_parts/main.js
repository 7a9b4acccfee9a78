// The page: its sections in order, for one run or for several that are laid over each other.

const DATA = JSON.parse(document.getElementById("data").textContent);

function buildPage(runs) {
  const names = runs.map((run) => run.name).join(", ");
  document.title = `${names} - megarl report`;
  document.getElementById("header").replaceChildren(make("h1", { text: names }), ...(isPresent(DATA.version) ? [followControl()] : []));
  forEachRun(section("Overview", "overview"), runs, (parent, run) => {
    parent.append(addOverview(run));
    addSigns(parent, run);
  });
  const learning = section("Learning", "learning");
  addPanels(learning, runs, LEARNING);
  addWarmStart(learning, runs);
  const time = section("Time", "time");
  addEach(time, runs, "Phases of a step", describePhases, (run) => run.metrics["time/step_s"]);
  addPanels(time, runs, SPEED);
  addDistributions(section("Distributions", "distributions"), runs);
  addPanels(section("Engine and trainer", "engine-and-trainer"), runs, ENGINE_AND_TRAINER);
  const staleness = section("Staleness", "staleness");
  addEach(staleness, runs, "Age of the tokens that a step trains on", describeAges, (run) => namesLike([run], /^stale\/share_/).length);
  addPanels(staleness, runs, STALENESS);
  addExperts(section("Experts", "experts"), runs);
  const reshard = section("Reshard", "reshard");
  addEach(reshard, runs, "Bytes of a reshard, all GPUs together", describeReshard, (run) => run.metrics["reshard/wire_bytes"]);
  addPanels(reshard, runs, RESHARD);
  const memory = section("Memory", "memory");
  addEach(memory, runs, "Memory by phase, the most of all steps", describeMemory,
    (run) => namesLike([run], /^memory\//).length || Object.keys(run.planned_memory).length);
  memory.append(soft("Measured: the most that a rank holds as the phase is entered, and just after. The plan is of the fullest GPU while the phase is at work."));
  forEachRun(section("Ranks", "ranks"), runs, addRankMap);
  const losses = section("Losses", "losses");
  addPanels(losses, runs, RECOVERY);
  forEachRun(losses, runs, addLosses);
  forEachRun(section("Recipe", "recipe"), runs, addRecipe);
  addAnyMetric(section("All metrics", "metrics"), runs);
  forEachRun(section("Samples", "samples"), runs, addSamples);
}

function forEachRun(parent, runs, add) {
  for (const run of runs) {
    const part = runs.length > 1 ? make("div", {}, make("h3", { text: run.name })) : parent;
    if (part !== parent) parent.append(part);
    add(part, run);
  }
}

// A chart for each run that has what it shows.
function addEach(parent, runs, title, describe, has) {
  const grid = make("div", { class: "charts" });
  for (const run of runs.filter(has)) addChart(grid, runs.length > 1 ? `${run.name}: ${title}` : title, () => describe(run));
  if (grid.children.length) parent.append(grid);
  else parent.append(soft(`Not recorded by this run: ${title}.`));
}

function addDistributions(parent, runs) {
  const has = (key) => (run) => run.samples.some((sample) => isPresent(sample[key]));
  parent.append(soft("Shares of the samples that this page has, of which a run writes run.sample_log_count a step; the lines are of all samples of a step."));
  addEach(parent, runs, "Reward", (run) => describeDistribution(run, "reward", [["reward/mean", "mean of all"], ["reward/std", "standard deviation"]]), has("reward"));
  addEach(parent, runs, "Response length, tokens", (run) =>
    describeDistribution(run, "length", [["rollout/response_length_mean", "mean of all"], ["rollout/response_length_max", "longest of all"]]), has("length"));
}

function addExperts(parent, runs) {
  addPanels(parent, runs, EXPERTS);
  addEach(parent, runs, "Busiest expert of each layer, over the layer's mean", describeBusiest, (run) => namesLike([run], BUSIEST_OF_LAYER).length);
  const title = "Tokens of each expert in a file of samples (--samples, with train.replay r3), over the layer's mean";
  addEach(parent, runs, title, (run) => describeExperts(run.expert_load), (run) => run.expert_load);
}

const browsers = [];
function addSamples(parent, run) {
  if (!run.samples.length) parent.append(soft("There are no samples."));
  else browsers.push(new SampleBrowser(parent, run.samples));
}

try {
  buildPage(DATA.runs);
} finally {
  // what fails on the page may be right in its next data
  if (isPresent(DATA.version)) follow();
}
