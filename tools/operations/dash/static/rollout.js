// One rollout: how far its boards are, why some do not have it, and what happened; the owner may take it back.
import { boardLink, day, duration, h, metric, percent, since, sync, table, tile } from "./dom.js";
import { boards } from "./rollouts.js";
import { actions, status } from "./runs.js";

const TITLES = { back: "Take this rollout back" };

export function page(place, { name, again, ask, session, say }) {
  const head = h("p", { class: "soft" }), tiles = h("dl", { class: "tiles" }), why = h("p", { class: "notice bad", hidden: true }), waits = h("p", { class: "notice", hidden: true });
  const sure = (what) => `${TITLES[what]}: ${name}? Boards that have it return to what they ran before.`;
  const acts = actions(`rollouts/${encodeURIComponent(name)}`, TITLES, sure, "To take rollouts back", { again, ask, session, say });
  const counts = h("div"), more = h("p", { class: "none", hidden: true });
  const { made: list, body } = table("boards of this rollout", [{ text: "Board" }, { text: "Step" }, { text: "How far" }, { text: "Accuracy", class: "number" }, { text: "Answer", class: "number" }, { text: "Why" }], "cards");
  const { made: log, body: lines } = table("what happened", [{ text: "When" }, { text: "What" }], "cards");
  place.append(
    h("p", { class: "crumbs" }, h("a", { href: "/rollouts" }, "Rollouts")), h("h1", {}, name), head, acts.made, why, waits, tiles,
    h("section", {}, h("h2", {}, "Boards"), counts, list, more),
    h("section", {}, h("h2", {}, "What happened"), log));

  async function show() {
    const told = await ask(`/api/rollouts/${encodeURIComponent(name)}`);
    head.replaceChildren(status(told.status), ` ${told.kind} ${told.name} · for ${told.select.join(" ") || "all boards"}${told.submitter ? ` · by ${told.submitter}` : ""}`,
      told.revert_requested ? " · its return is requested" : "");
    why.hidden = !told.reason;
    why.textContent = told.reason;
    waits.hidden = !told.waits;
    waits.textContent = `It waits for ${told.waits}`;
    tiles.replaceChildren(tile("step", told.now), tile("boards that were offered it", String(told.offered)), ...begun(told),
      ...Object.entries(told.limits).map(([what, limit]) => tile(what, limit)));
    acts.offer({ back: ["queued", "running", "done"].includes(told.status) });
    counts.replaceChildren(told.offered ? boards(told.counts) : "No board has been offered it yet.");
    list.hidden = !told.boards.length;
    sync(body, told.boards, (each) => each.device, row);
    more.hidden = !told.more;
    more.textContent = `and ${told.more} more; \`fedquilt rollout status ${name} --format json\` has them all`;
    sync(lines, told.steps, (each) => `${each.at} ${each.text}`, (each) => h("tr", {}, h("th", { scope: "row" }, day(each.at)), h("td", { class: "words" }, each.text)));
  }

  // A rollout that goes on has an age, and one that has ended lasted so long.
  function begun({ created, status: stands, steps }) {
    const ended = steps.at(-1)?.at;
    if (["queued", "running"].includes(stands) || ended === undefined) return [tile("begun", since(created, "", " ago"))];
    return [tile("begun", day(created)), tile("lasted", duration(ended - created))];
  }

  function row(each) {
    const measured = each.metrics, td = (title, className, ...children) => h("td", { "data-head": title, class: className }, ...children);
    const gain = measured.accuracy !== undefined && measured.accuracy_before !== undefined ? ` (before ${percent(measured.accuracy_before, 1)})` : "";
    return h("tr", {}, h("th", { scope: "row" }, boardLink(each.device)), td("Step", "", each.step ? `phase ${each.step}` : "canary"), td("How far", "", status(each.phase)),
      td("Accuracy", "number", measured.accuracy === undefined ? "–" : `${metric({ share: true }, measured.accuracy)}${gain}`),
      td("Answer", "number", measured.latency_s === undefined ? "–" : `${(1000 * measured.latency_s).toPrecision(3)} ms`), td("Why", "words", each.reason));
  }

  return { show, wants: ["runs"], allowed: again, gone: () => { acts.made.hidden = true; } };
}
