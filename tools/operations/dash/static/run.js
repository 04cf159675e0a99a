// One run, live: figures, plots over its rounds, who took part in a round and why the others did not, and its report.
import { boardLink, day, field, h, joules, metric, pager, query, remember, since, size, sync, table, tile } from "./dom.js";
import { plot, ticks } from "./plot.js";
import { actions, status, tally } from "./runs.js";

const TITLES = { approve: "Approve this run", stop: "Stop this run", resume: "Resume this run" };
const REPORT_MS = 15000;

export function page(place, { name, again, ask, session, say }) {
  const head = h("p", { class: "soft" }), tiles = h("dl", { class: "tiles" }), wait = h("p", { class: "notice", hidden: true });
  const acts = actions(`runs/${encodeURIComponent(name)}`, TITLES, (what) => `${TITLES[what]}: ${name}?`, "To approve, stop and resume", { again, ask, session, say });
  const plots = h("div", { class: "plots" }), live = h("p", { class: "soft" });
  const counts = h("div", { class: "tally" });
  const step = (by) => { remember({ round: String(Math.max(1, shownRound + by)), page: "" }); again(); };
  let shownRound = 0, done = null, drawnAt = 0, drawing = false;
  const back = h("button", { type: "button", onclick: () => step(-1) }, "Earlier"), on = h("button", { type: "button", onclick: () => step(1) }, "Later");
  const newest = h("button", { type: "button", onclick: () => { remember({ round: "", page: "" }); again(); } }, "Latest");
  const which = h("input", { type: "number", min: 1, inputmode: "numeric", onchange: () => { remember({ round: which.value, page: "" }); again(); } });
  const { made: list, body } = table("devices in this round", [{ text: "Board" }, { text: "Outcome, or why it was not selected" }], "why");
  const pages = pager((by) => { remember({ page: String(Number(query.get("page") || 1) + by) }); again(); });
  const frame = h("iframe", { title: "report of this run", sandbox: "allow-same-origin", hidden: true });
  const framed = h("p", { class: "none" }, "The report is being drawn.");
  frame.addEventListener("load", fit);
  addEventListener("resize", fit);
  function fit() {
    const found = frame.contentDocument?.documentElement;
    if (found && frame.src) frame.style.height = `${found.scrollHeight + 8}px`;
  }
  place.append(
    h("p", { class: "crumbs" }, h("a", { href: "/runs" }, "Runs")), h("h1", {}, name), head, acts.made, tiles, wait,
    h("section", {}, h("h2", {}, "Rounds"), plots),
    h("section", { id: "why" }, h("h2", {}, "Devices of a round"), live,
      h("div", { class: "filters" }, h("label", {}, h("span", {}, "Round"), which), h("div", { class: "views" }, back, on, newest),
        field("Board or reason", "text", { placeholder: "pi-02, offline, memory" }, again)),
      counts, list, pages.made),
    h("section", {}, h("h2", {}, "Report"), framed, frame));

  async function show() {
    const wanted = new URLSearchParams(["round", "code", "text", "page"].filter((key) => query.get(key)).map((key) => [key, query.get(key)]));
    const told = await ask(`/api/runs/${encodeURIComponent(name)}`);
    head.replaceChildren(status(told.status), ` ${told.method} · begun ${day(told.began)}${told.reason ? ` · ${told.reason}` : ""}`);
    steer(told);
    const value = told.metric;
    tiles.replaceChildren(
      tile("rounds", `${told.done} of ${told.rounds}`),
      tile(`held-out ${value.title}`, metric(value, value.held_out), value.held_out === null ? "not evaluated" : ""),
      value.test === null ? "" : tile(`test ${value.title}`, metric(value, value.test)),
      tile("down", size(told.down_bytes)), tile("up", size(told.up_bytes)),
      tile("energy of the boards", joules(told.joules), told.tasks && told.metered < told.tasks ? `${told.metered} of ${told.tasks} tasks metered` : ""),
      tile("declined or rejected", String(told.declined)),
      tile("last event", since(told.fact_at, "", " ago")));
    const now = told.now;
    wait.hidden = !now?.waits;
    if (now?.waits) wait.textContent = `Waits for ${now.waits}`;
    live.hidden = !now;
    if (now) {
      live.replaceChildren(`${now.name[0].toUpperCase()}${now.name.slice(1)}${now.attempt ? `, attempt ${now.attempt + 1}` : ""}, ${now.answered} of ${now.selected} updates`,
        now.asked.length ? (told.status === "interrupted" ? "; no update from " : "; at work: ") : "", ...now.asked.slice(0, 12).flatMap((each, place) => [place ? ", " : "", boardLink(each)]), now.asked.length > 12 ? ` and ${now.asked.length - 12} more` : "");
    }
    draw(told);
    await because(wanted);
    report(told);
  }

  function draw(told) {
    const max = Math.max(2, ...told.table.map((row) => row.round));
    const across = { min: 1, max, ticks: ticks(1, max, 6).filter((each) => Number.isInteger(each) && each >= 1 && each <= max), tick: String, tell: (at) => `after ${at} rounds` };
    const line = (title, of, className = "c0") => ({ name: title, class: className, points: told.table.map((row) => [row.round, of(row)]) });
    const scale = told.metric.share ? 100 : 1, unit = told.metric.share ? "%" : "";
    const share = (value) => (value === null || value === undefined ? null : scale * value);
    const title = `Held-out ${told.metric.title}`;
    plots.replaceChildren(
      plot(`${title}${unit && ", %"}`, [line("all", (row) => share(row.accuracy)), line("worst tenth", (row) => share(row.worst_decile), "c1"), line("spread", (row) => share(row.deviation), "c2")], across, { unit, most: told.metric.share ? 100 : undefined, nothing: "not evaluated yet" }),
      plot("Bytes a round, MB", [line("down", (row) => row.down_bytes / 1e6), line("up", (row) => row.up_bytes / 1e6, "c1")], across, { zero: true, unit: "MB", nothing: "no round yet" }),
      plot("Energy a round, J", [line("all boards", (row) => row.joules)], across, { zero: true, unit: "J", nothing: "no round yet, or a board without a meter" }),
      plot("Seconds a round", [line("from opening to end", (row) => row.seconds)], across, { zero: true, unit: "s", nothing: "no round yet" }));
  }

  async function because(wanted) {
    const told = await ask(`/api/runs/${encodeURIComponent(name)}/why?${wanted}`);
    list.hidden = told.round === null;
    if (told.round === null) { counts.replaceChildren("No round yet."); pages.show(1, 1, 0, "board"); return; }
    shownRound = told.round;
    if (document.activeElement !== which) which.value = told.round;
    which.max = told.last;
    back.disabled = told.round <= told.first;
    on.disabled = newest.disabled = told.round >= told.last;
    const code = query.get("code") ?? "";
    const choose = (value) => () => { remember({ code: value, page: "", round: query.get("round") }); again(); };
    sync(counts, [{ code: "", text: "all", count: told.counts.reduce((sum, each) => sum + each.count, 0), on: code === "" }, ...told.counts.map((each) => ({ ...each, on: each.code === code }))], (each) => each.code || "all",
      (each) => h("button", { type: "button", class: `code ${each.code}`, "aria-pressed": String(each.on), onclick: choose(each.code) }, `${each.count.toLocaleString("en")} ${each.text}`));
    sync(body, told.devices, (each) => each.device, (each) => h("tr", {}, h("th", { scope: "row" }, boardLink(each.device)), h("td", { class: "words" }, h("span", { class: `code ${each.code}` }, each.text), each.contribution ? h("small", {}, ` ${each.contribution}`) : null)));
    pages.show(told.page, told.pages, told.found, "board");
  }

  // The report is drawn anew after a round, and not too often.
  async function report(told) {
    const mark = `${told.done} ${told.status}`;
    if (drawing || mark === done || Date.now() < drawnAt + REPORT_MS && done !== null) return;
    drawing = true;
    const path = `/api/runs/${encodeURIComponent(name)}/report?${new URLSearchParams({ mark })}`;
    try {
      const answer = await fetch(path);
      if (answer.ok) {
        await answer.text();
        frame.src = path;
        frame.hidden = false;
        framed.hidden = true;
      } else {
        framed.textContent = (await answer.json()).problem;
      }
      done = mark;
    } catch {
      framed.textContent = "The report could not be fetched.";
    }
    drawnAt = Date.now();
    drawing = false;
  }

  function steer({ origin, status: stands }) {
    acts.offer({ approve: stands === "waiting for approval", stop: ["armed", "waiting for approval", "queued", "running", "waiting", "held"].includes(stands), resume: ["stopped", "failed", "interrupted"].includes(stands) && origin === "run" });
  }

  return { show, wants: ["runs"], allowed: again, gone: () => { acts.made.hidden = true; live.hidden = true; } };
}
