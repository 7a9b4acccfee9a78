// A page that its server keeps current: new data is asked for, and the page is built anew where the reader was.

const ASK_MS = 3000;
let isFollowing = true;
let dataVersion = null; // of the data that is shown; null: the page has what it was written with

function followControl() {
  const box = make("input", { type: "checkbox", id: "follow", on: { change: () => { isFollowing = box.checked; } } });
  box.checked = isFollowing;
  return make("label", { class: "row soft" }, box, " follow the run; ", make("span", { id: "followed", text: "" }));
}

async function follow() {
  try {
    if (isFollowing && !isWriting()) await askForData();
  } catch (error) {
    document.getElementById("followed").textContent = `no answer: ${error.message}`;
  }
  setTimeout(follow, ASK_MS);
}

// Whether the reader has the cursor in a field, from which a new page would take it.
function isWriting() {
  const focused = document.activeElement;
  return focused?.tagName === "INPUT" && ["text", "search", "number"].includes(focused.type);
}

async function askForData() {
  const answer = await fetch("data", { headers: { "If-None-Match": dataVersion ?? DATA.version }, cache: "no-store" });
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(await answer.text());
  const data = await answer.json();
  showAgain(data.runs);
  dataVersion = answer.headers.get("ETag");
}

function showAgain(runs) {
  const place = window.scrollY;
  const states = browsers.map((browser) => browser.state());
  for (const plot of charts.keys()) Plotly.purge(plot);
  charts.clear();
  browsers.length = 0;
  for (const id of ["main", "contents"]) document.getElementById(id).replaceChildren();
  buildPage(runs);
  browsers.forEach((browser, index) => states[index] && browser.restore(states[index]));
  window.scrollTo(0, place);
  document.getElementById("followed").textContent = `as of ${new Date().toLocaleTimeString()}`;
}
