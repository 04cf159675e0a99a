// All rollouts, the latest first: what each brings, how far it is, and how many boards have it.
import { day, h, since, sync, table } from "./dom.js";
import { status } from "./runs.js";

const WORDS = { committed: "have it", soaking: "try it", checking: "check it", fetching: "fetch it", waiting: "wait", refused: "refused it", returned: "went back", lost: "fell silent", silent: "have said nothing" };
const COLOURS = { committed: "answered", refused: "declined", returned: "declined", lost: "declined", soaking: "asked", checking: "asked", fetching: "asked" };

export function page(place, { ask }) {
  const { made: list, body } = table("rollouts", [{ text: "Rollout" }, { text: "Status" }, { text: "Step" }, { text: "Boards" }, { text: "Begun" }], "cards rollouts");
  const empty = h("p", { class: "none", hidden: true }, "No rollout yet: `fedquilt rollout model RUN` begins one.");
  const unserved = h("p", { class: "notice", hidden: true }, "No coordinator serves this home: no rollout goes on.");
  place.append(h("h1", {}, "Rollouts"), unserved, empty, list);
  async function show() {
    const told = await ask("/api/rollouts");
    unserved.hidden = told.served;
    empty.hidden = told.rollouts.length > 0;
    list.hidden = !told.rollouts.length;
    sync(body, told.rollouts, (each) => each.rollout, row);
  }
  return { show, wants: ["runs"] };
}

// How many boards are how far.
export const boards = (counts) => h("span", { class: "tally" }, Object.entries(counts).map(([phase, count]) => h("span", { class: `code ${COLOURS[phase] ?? ""}` }, `${count.toLocaleString("en")} ${WORDS[phase] ?? phase}`)));

function row(each) {
  const link = h("a", { href: `/rollouts/${encodeURIComponent(each.rollout)}` }, each.rollout);
  if (each.problem) return h("tr", {}, h("th", { scope: "row" }, each.rollout), h("td", { class: "words bad", colspan: 4 }, each.problem));
  const td = (name, ...children) => h("td", { "data-head": name }, ...children);
  return h("tr", {}, h("th", { scope: "row" }, link, h("small", {}, `${each.kind} ${each.name}`)),
    td("Status", status(each.status), each.waits ? h("small", {}, `waits for ${each.waits}`) : ""), td("Step", each.now),
    h("td", { "data-head": "Boards", class: "words" }, each.offered ? boards(each.counts) : "none yet"),
    td("Begun", ["queued", "running"].includes(each.status) ? since(each.created, "", " ago") : day(each.created)));
}
