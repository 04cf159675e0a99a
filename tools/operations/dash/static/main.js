// Which page this is, what it is told of changes, and who may do more than look.
import { h, hear } from "./dom.js";
import * as board from "./board.js";
import * as fleet from "./fleet.js";
import * as log from "./log.js";
import * as rollout from "./rollout.js";
import * as rollouts from "./rollouts.js";
import * as run from "./run.js";
import * as runs from "./runs.js";

const main = document.getElementById("main"), link = document.getElementById("link");
const SLOW_MS = 10000, ANYWAY_MS = 20000, LEAST_MS = 250;

class Problem extends Error {
  constructor(status, said) { super(said); this.status = status; }
}

async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { ...(options.headers ?? {}) } });
  } catch {
    throw new Problem(0, "the dashboard does not answer; runs go on without it");
  }
  const told = await answer.json().catch(() => ({ problem: `an answer that cannot be read (${answer.status})` }));
  if (!answer.ok) throw new Problem(answer.status, told.problem ?? `refused (${answer.status})`);
  if (told.at) hear(told.at);
  return told;
}

// -- pages --

const words = location.pathname.split("/").filter(Boolean).map(decodeURIComponent);
const kinds = { boards: words[1] ? board : fleet, runs: words[1] ? run : runs, rollouts: words[1] ? rollout : rollouts, log };
const kind = kinds[words[0]] ?? fleet;
const title = words[1] ?? { boards: "Fleet", runs: "Runs", rollouts: "Rollouts", log: "Log" }[words[0]] ?? "Fleet";
document.title = `${title} · fedquilt`;
for (const each of document.querySelectorAll("header nav a")) {
  const here = each.pathname === `/${words[0] ?? "boards"}`;
  if (here) each.setAttribute("aria-current", "page");
}

const notice = h("p", { class: "notice", role: "status", "aria-live": "polite", hidden: true });
const place = h("div");
main.replaceChildren(notice, place);
const session = { proof: null, actions: false };
const page = kind.page(place, { name: words[1], again: () => show(), ask, session, say });

function say(text, bad = false) {
  notice.hidden = !text;
  notice.classList.toggle("bad", bad);
  if (notice.textContent !== text) notice.textContent = text;
}

let busy = false, wanted = false, last = 0, waiting = null;

// One request at a time, and the last wish is never lost.
async function show() {
  if (busy) { wanted = true; return; }
  const early = last + LEAST_MS - Date.now();
  if (early > 0) {
    waiting ??= setTimeout(() => { waiting = null; show(); }, early);
    return;
  }
  busy = true;
  const slow = setTimeout(() => { if (!document.body.dataset.shown) { notice.from = "show"; say("Being read."); } }, 500);
  try {
    await page.show();
    document.body.dataset.shown = String(Number(document.body.dataset.shown ?? 0) + 1);
    if (notice.from === "show") { notice.from = null; say(""); }
  } catch (problem) {
    if (!(problem instanceof Problem)) console.error(problem);
    notice.from = "show";
    say(problem.message, true);
    if (problem.status === 404) page.gone?.();
  }
  clearTimeout(slow);
  busy = false;
  last = Date.now();
  if (wanted) { wanted = false; show(); }
}

// -- changes --

let source = null, slow = null, seen = {}, retry = 1000;

function told(text, live) {
  link.className = live ? "live" : "dead";
  if (link.textContent !== text) link.textContent = text;
}

function listen() {
  source?.close();
  if (document.hidden) return;
  source = new EventSource("/api/events");
  source.onmessage = (event) => {
    const changes = JSON.parse(event.data);
    clearInterval(slow);
    slow = null;
    retry = 1000;
    told("live", true);
    if (page.wants.some((name) => changes[name] !== seen[name])) show();
    seen = changes;
  };
  source.onerror = () => {
    source.close();
    source = null;
    told("not live: asking now and then", false);
    slow ??= setInterval(show, SLOW_MS);
    setTimeout(() => { if (!source) listen(); }, retry);
    retry = Math.min(retry * 2, 60000);
    show();
  };
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) { source?.close(); source = null; return; } // a browser has few connections for all its tabs
  listen();
  show();
});
setInterval(() => { if (!document.hidden) show(); }, ANYWAY_MS);

// -- who may do more --

async function enter() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (token) {
    history.replaceState(null, "", location.pathname + location.search); // it stays in no history
    Object.assign(session, await ask("/api/session", { method: "POST", body: JSON.stringify({ token }) }));
    say("This browser may approve, stop and resume runs, and end rollouts, until the dashboard is started anew.");
  } else {
    Object.assign(session, await ask("/api/session"));
  }
  page.allowed?.();
}

listen();
await Promise.all([show(), enter().catch((problem) => say(problem.message, true))]);
