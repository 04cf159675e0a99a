// The fleet: a row or a cell for each board, by state, label and text, a page at a time.
import { bar, boardLink, field, h, jobOf, number, pager, percent, plural, query, remember, runLink, since, size, state, sync, table } from "./dom.js";

const STATES = ["all", "online", "working", "idle", "offline", "silent", "refused"];
const HEADS = [["name", "Board"], ["state", "State"], ["since", "For"], [null, "Doing"], ["watts", "W"], ["temperature", "°C"], ["memory", "Memory"], [null, "Labels"], ["refusal", "Last refusal"]];

export function page(place, { again, ask }) {
  const tabs = STATES.map((name) => {
    const count = h("b", {}, "–");
    const made = h("button", { type: "button", onclick: () => { remember({ state: name === "all" ? "" : name, page: "" }); again(); } }, h("span", {}, name === "all" ? "all boards" : name), count);
    return { name, made, count };
  });
  const offered = h("datalist", { id: "labels" });
  const views = ["table", "grid"].map((name) => h("button", { type: "button", onclick: () => { remember({ view: name === "grid" ? "grid" : "", page: "" }); again(); } }, name));
  const unserved = h("p", { class: "notice bad", hidden: true }, "No coordinator serves this home: the boards are shown as the last one knew them.");
  const sorts = HEADS.map(([name, text], number) => ({
    text, class: number >= 4 && number <= 5 ? "number" : null,
    button: name && h("button", { type: "button", class: "sort", onclick: () => {
      const held = query.get("sort") ?? "name", first = ["name", "state"].includes(name) ? name : `-${name}`;
      remember({ sort: held === first ? (first.startsWith("-") ? name : `-${name}`) : first, page: "" });
      again();
    } }, text),
  }));
  const { made: list, body, cells } = table("boards", sorts, "cards fleet");
  const grid = h("ul", { class: "grid", "aria-label": "boards" });
  const keys = h("ul", { class: "keys" }, ["working", "asked", "waiting", "sending", "idle", "offline", "silent"].map((name) => h("li", {}, state(name))), h("li", {}, h("span", { class: "state refused" }, "has refused")));
  const pages = pager((step) => { remember({ page: String(Number(query.get("page") || 1) + step) }); again(); });
  const empty = h("p", { class: "none", hidden: true });
  place.append(
    h("h1", { class: "hidden" }, "Fleet"), unserved,
    h("div", { class: "tabs", role: "group", "aria-label": "state" }, tabs.map((each) => each.made)),
    h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      field("Search", "text", { placeholder: "name, board, job" }, again),
      field("Labels", "label", { placeholder: "site=lab !window", list: "labels" }, again), offered,
      h("div", { class: "views", role: "group", "aria-label": "view" }, views)),
    empty, list, grid, keys, pages.made);

  async function show() {
    const told = await ask(`/api/fleet?${query}`), isGrid = query.get("view") === "grid";
    unserved.hidden = told.served || !told.counts.all;
    for (const each of tabs) {
      each.count.textContent = told.counts[each.name].toLocaleString("en");
      each.made.setAttribute("aria-pressed", String((query.get("state") ?? "all") === each.name));
    }
    views.forEach((each) => each.setAttribute("aria-pressed", String((each.textContent === "grid") === isGrid)));
    const sort = query.get("sort") ?? "name";
    cells.forEach((cell, number) => {
      const name = HEADS[number][0];
      cell.setAttribute("aria-sort", name && sort.replace("-", "") === name ? (sort.startsWith("-") ? "descending" : "ascending") : "none");
    });
    sync(offered, told.labels, (label) => label, (label) => h("option", { value: label }));
    list.hidden = isGrid || !told.boards.length;
    grid.hidden = keys.hidden = !isGrid || !told.boards.length;
    empty.hidden = told.boards.length > 0;
    empty.textContent = told.counts.all ? "No board matches." : "No board yet: `fedquilt agent` on a board connects it to a coordinator. Simulated devices are on the page of their run.";
    if (isGrid) { sync(grid, told.boards, (each) => each[0], cell); body.replaceChildren(); } else { sync(body, told.boards, (each) => each.device, row); grid.replaceChildren(); }
    pages.show(told.page, told.pages, told.found, "board");
  }
  return { show, wants: ["boards", "runs"] };
}

function cell([name, word, share, refused]) {
  const told = `${name}: ${word}${share === null ? "" : ` ${percent(share)}`}${refused ? ", has refused" : ""}`;
  return h("li", {}, h("a", { href: `/boards/${encodeURIComponent(name)}`, class: `s-${word}${refused ? " refused" : ""}`, title: told, "aria-label": told }));
}

const named = (text, className, ...children) => h("td", { "data-head": text, class: className }, ...children);

function row(each) {
  const { doing, refusal } = each;
  const missing = (value) => (value === null || value === undefined ? "none" : "");
  return h("tr", {},
    h("th", { scope: "row" }, boardLink(each.device), h("small", {}, [each.board, each.mode].filter(Boolean).join(", "))),
    named("State", "", state(each.state)),
    named("For", missing(each.since), since(each.since)),
    named("Doing", doing ? "" : "none", doing ? work(doing) : null),
    named("W", `number ${missing(each.power_w)}`, number(each.power_w)),
    named("°C", `number ${missing(each.temperature_c)} ${each.temperature_c >= 85 ? "hot" : ""}`, each.temperature_c === null || each.temperature_c === undefined ? "–" : each.temperature_c.toFixed(0)),
    named("Memory", each.budget_bytes ? "" : "none", each.budget_bytes ? memory(each) : null),
    named("Labels", (each.labels ?? []).length ? "" : "none", (each.labels ?? []).map((label) => h("span", { class: "chip" }, label))),
    named("Last refusal", refusal ? "words" : "none", refusal ? told(refusal) : null));
}

export function work(doing) {
  const share = doing.fraction ?? null;
  return h("span", { class: "work" }, runLink(doing.job, jobOf(doing.job)), ` round ${doing.round + 1}`, share === null ? null : bar(share, `${percent(share)} done`), share === null ? null : h("small", {}, percent(share)), h("small", {}, since(doing.since)));
}

export function memory(each) {
  const held = each.task_bytes ?? 0;
  return h("span", { class: "work" }, bar(held / each.budget_bytes, `task's memory ${size(held)} of ${size(each.budget_bytes)}`), h("small", {}, held ? `${size(held)} of ${size(each.budget_bytes)}` : size(each.budget_bytes)));
}

export function told(refusal) {
  return h("span", { title: refusal.reason }, h("span", { class: "chip warn" }, refusal.code), h("small", {}, since(refusal.at, "", " ago")));
}
