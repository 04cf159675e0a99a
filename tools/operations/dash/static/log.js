// What has happened, the latest first, by run, kind, board and words.
import { boardLink, choice, clock, day, field, h, jobOf, plural, query, runLink, sync } from "./dom.js";

export function page(place, { again, ask }) {
  const run = choice("Run", "run", [["", "all that go on, and the last two"]], again);
  const kind = choice("Kind", "kind", [["", "all"]], again);
  const list = h("ol", { class: "log", "aria-label": "log, the latest first" }), found = h("p", { class: "soft" });
  place.append(h("h1", {}, "Log"),
    h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() }, run, kind, field("Board", "device", {}, again), field("Words", "text", {}, again)), found, list);
  async function show() {
    const told = await ask(`/api/log?${query}`);
    run.offer([["", "all that go on, and the last two"], ...told.runs.map((each) => [each, each])]);
    kind.offer([["", "all"], ...told.kinds.map((each) => [each, each])]);
    found.textContent = told.reading ? "The logs of runs are being read." : told.found > told.lines.length ? `The latest ${told.lines.length} of ${plural(told.found, "line")}; \`fedquilt logs RUN\` has all of a run.` : plural(told.found, "line");
    sync(list, told.lines, (line) => `${line.run} ${line.seq}`, row);
  }
  return { show, wants: ["runs"] };
}

function row(line) {
  return h("li", { class: `k-${line.kind}` }, h("span", { class: "when", title: day(line.at) }, clock(line.at)), runLink(line.run, jobOf(line.run)),
    h("span", { class: "said" }, line.device && line.text.includes(line.device) ? parted(line) : line.text, line.more.map((each) => h("small", {}, each))));
}

function parted({ text, device }) {
  const at = text.indexOf(device);
  return [text.slice(0, at), boardLink(device), text.slice(at + device.length)];
}
