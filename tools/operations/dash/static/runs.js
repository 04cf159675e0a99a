// All runs, the latest first; those that go on with who works, who has answered and who was not asked.
import { bar, day, h, joules, metric, pager, query, remember, runLink, since, size, sync, table } from "./dom.js";

export function page(place, { again, ask }) {
  const { made: list, body } = table("runs", [{ text: "Run" }, { text: "Status" }, { text: "Rounds" }, { text: "Held-out", class: "number" }, { text: "Test", class: "number" }, { text: "Down and up", class: "number" }, { text: "Energy", class: "number" }, { text: "Now" }], "cards");
  const pages = pager((step) => { remember({ page: String(Number(query.get("page") || 1) + step) }); again(); });
  const empty = h("p", { class: "none", hidden: true }, "No run yet: `fedquilt simulate DATA` or `fedquilt run JOB` starts one.");
  const unserved = h("p", { class: "notice", hidden: true }, "No coordinator serves this home: unfinished runs wait for one.");
  list.hidden = true; // until something is known
  place.append(h("h1", {}, "Runs"), unserved, empty, list, pages.made);
  async function show() {
    const told = await ask(`/api/runs?${query}`);
    unserved.hidden = told.served || !told.runs.some((each) => each.now && each.origin === "run");
    empty.hidden = told.runs.length > 0;
    list.hidden = !told.runs.length;
    sync(body, told.runs, (each) => each.run, row);
    pages.show(told.page, told.pages, told.pages > 1 ? told.pages * 100 : told.runs.length, "run");
  }
  return { show, wants: ["runs"] };
}

export const status = (word) => h("span", { class: `status ${word}` }, word);

// Buttons by which whoever has the token acts on the run or rollout at `path`; `offer` shows those that can be pressed now.
export function actions(path, titles, sure, purpose, { again, ask, session, say }) {
  const made = h("p", { class: "buttons", hidden: true });
  let shown = "";
  function offer(can) {
    const may = session.proof !== null, text = JSON.stringify([may, can]);
    made.hidden = !session.actions;
    if (!session.actions || shown === text) return;
    shown = text;
    made.replaceChildren(...Object.keys(titles).filter((what) => can[what]).map((what) => h("button", { type: "button", disabled: !may, onclick: () => act(what) }, titles[what])),
      may ? "" : h("small", {}, `${purpose}, open the address that \`fedquilt dash --actions\` printed.`));
  }

  async function act(what) {
    if (!confirm(sure(what))) return;
    try {
      const told = await ask(`/api/${path}/${what}`, { method: "POST", headers: { "x-fedquilt-proof": session.proof } });
      say(told.said);
    } catch (problem) {
      say(problem.message, true);
    }
    again();
  }

  return { made, offer };
}

export function tally(now, run) {
  return h("span", { class: "tally" }, now.counts.map((each) => h("a", { href: `/runs/${encodeURIComponent(run)}?round=${now.round}&code=${encodeURIComponent(each.code)}#why`, class: `code ${each.code}` }, `${each.count.toLocaleString("en")} ${each.text.split(":")[0]}`)));
}

const result = ({ metric: of }, data) => (of && of[data] !== null ? [metric(of, of[data]), h("small", {}, ` ${of.title}`)] : "–");

function row(each) {
  const head = h("th", { scope: "row" }, runLink(each.run), h("small", {}, [each.method, each.changed, each.began && `begun ${day(each.began)}`].filter(Boolean).join(", ")));
  if (each.problem) return h("tr", {}, head, h("td", { "data-head": "Status" }, status(each.status)), h("td", { class: "words bad", colspan: 6 }, each.problem));
  const known = each.done !== undefined;
  const now = each.now;
  const td = (name, className, ...children) => h("td", { "data-head": name, class: className }, ...children);
  return h("tr", {}, head,
    td("Status", "", status(each.status)),
    td("Rounds", "", known ? h("span", { class: "work" }, bar(each.done / each.rounds, `${each.done} of ${each.rounds} rounds`), h("small", {}, `${each.done} of ${each.rounds}`)) : h("small", {}, "being read")),
    td("Held-out", "number", result(each, "held_out")),
    td("Test", "number", result(each, "test")),
    td("Down and up", "number", known ? size(each.down_bytes + each.up_bytes) : "–"),
    td("Energy", "number", known ? joules(each.joules) : "–"),
    td("Now", "words", now ? [now.waits ? h("span", { class: "waits" }, `waits for ${now.waits}`) : h("span", {}, `${now.name}: ${now.answered} of ${now.selected} updates`), tally(now, each.run)] : each.reason || ""));
}
