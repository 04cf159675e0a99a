// One board: as it is now, its sensors, and its part in each round.
import { day, duration, h, jobOf, number, query, remember, runLink, since, size, state, sync, table, tile, timeOfDay } from "./dom.js";
import { memory, work } from "./fleet.js";
import { plot } from "./plot.js";

const SPANS = [["2h", "2 hours"], ["2d", "2 days"], ["30d", "30 days"]];
const PARTS = [["before_s", "wait"], ["down_s", "down"], ["train_s", "train"], ["up_s", "up"], ["after_s", "wait"]];
const GAP = { "2h": 120, "2d": 1200, "30d": 14400 };

export function page(place, { name, again, ask }) {
  const head = h("p", { class: "soft" }), now = h("dl", { class: "tiles" }), refusal = h("p", { class: "notice", hidden: true });
  const spans = SPANS.map(([span, text]) => h("button", { type: "button", "data-span": span, onclick: () => { remember({ span: span === "2h" ? "" : span }); again(); } }, text));
  const plots = h("div", { class: "plots" });
  const { made: list, body } = table("rounds of this board", [{ text: "Round" }, { text: "Outcome" }, { text: "Where its time went" }, { text: "Lasted", class: "number" }], "cards turns");
  const none = h("p", { class: "none" });
  place.append(
    h("p", { class: "crumbs" }, h("a", { href: "/boards" }, "Fleet")), h("h1", {}, name), head, now, refusal,
    h("section", {}, h("h2", {}, "Sensors"), h("div", { class: "tabs small", role: "group", "aria-label": "span" }, spans), plots),
    h("section", {}, h("h2", {}, "Rounds"),
      h("ul", { class: "keys" }, ["wait", "down", "train", "up"].map((part) => h("li", {}, h("i", { class: `k p-${part}` }), part))),
      h("p", { class: "soft" }, "Each bar is one round, from its opening to its end. A board reports fetching and sending as one time; it is shared out by bytes."), none, list));

  async function show() {
    const told = await ask(`/api/boards/${encodeURIComponent(name)}?${query}`), board = told.board;
    const span = query.get("span") ?? "2h";
    spans.forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.span === span)));
    if (board) {
      head.replaceChildren(...[board.board || "unknown hardware", board.mode && `mode ${board.mode}`, board.version && `agent ${board.version}`, (board.engines ?? []).join(" "),
        board.skew_s !== null && board.skew_s !== undefined && (Math.abs(board.skew_s) >= 1 ? `clock ${number(board.skew_s)} s off` : "clock right")].filter(Boolean).join(" · "),
        ...(board.labels ?? []).flatMap((label) => [" ", h("span", { class: "chip" }, label)]));
      now.replaceChildren(
        tile("state", state(board.state), told.served ? "" : "as last known"),
        board.silent ? tile("silent since", timeOfDay(board.since)) : tile(board.online ? "online for" : "offline for", since(board.since)),
        tile("last heard", since(board.seen, "", " ago")),
        tile("doing", board.doing ? work(board.doing) : "nothing"),
        tile("power", board.power_w === null || board.power_w === undefined ? "–" : `${number(board.power_w)} W`),
        tile("temperature", board.temperature_c === null || board.temperature_c === undefined ? "–" : `${board.temperature_c.toFixed(0)} °C`),
        tile("task's memory", board.budget_bytes ? memory(board) : "–"),
        ...(board.served === null || board.served === undefined ? [] : [tile("answers", number(board.served)),
          tile("drift", board.drift === null || board.drift === undefined ? "–" : board.drift.toFixed(2), "of its model's inputs"),
          ...(board.accuracy === null || board.accuracy === undefined ? [] : [tile("accuracy", `${(100 * board.accuracy).toFixed(0)} %`, "where labels arrive")])]),
        ...(board.runs ?? []).map((each) => tile(each.kind, each.name || each.current?.slice(0, 12) || "as flashed", h("a", { href: `/rollouts/${encodeURIComponent(each.rollout)}` }, ` ${each.phase}`))));
      refusal.hidden = !board.refusal;
      if (board.refusal) {
        refusal.replaceChildren(h("strong", {}, `Refused (${board.refusal.code}), `), since(board.refusal.at, "", " ago"),
          board.refusal.job ? h("span", {}, ", ", runLink(board.refusal.job, jobOf(board.refusal.job)), ` round ${board.refusal.round + 1}`) : "", `: ${board.refusal.reason}`);
      }
    } else {
      head.textContent = "Nothing is noted of this board beside its rounds.";
      now.replaceChildren();
    }
    draw(plots, told, span);
    none.hidden = told.turns.length > 0;
    none.textContent = told.reading ? "The logs of runs are being read." : "No run that is followed here has known this board; `fedquilt why RUN --device` has all rounds.";
    list.hidden = !told.turns.length;
    sync(body, told.turns, (turn) => `${turn.run} ${turn.round}`, row);
  }
  return { show, wants: ["boards", "runs"] };
}

function draw(plots, told, span) {
  const [min, max] = told.span, step = (max - min) / 4;
  const ticks = [0, 1, 2, 3, 4].map((each) => min + each * step);
  const across = { min, max, gap: GAP[span], ticks, tick: (at) => (at === max ? "now" : `−${duration(max - at).replace(/ 0 \w+$/, "")}`), tell: (at) => day(at) };
  const line = (name, place, scale = 1, className = "c0") => ({ name, class: className, points: told.readings.map((each) => [each[0], each[place] === null ? null : each[place] / scale]) });
  plots.replaceChildren(
    plot("Power, W", [line("mean", 1), line("highest", 2, 1, "c1")], across, { zero: true, unit: "W", nothing: "no meter has told anything in this time" }),
    plot("Hottest zone, °C", [line("highest", 3)], across, { unit: "°C", nothing: "no temperature was told in this time" }),
    plot("Memory, MB", [line("available", 4, 1e6), line("task", 5, 1e6, "c1")], across, { zero: true, unit: "MB", nothing: "no memory was told in this time" }));
  if (told.readings.some((each) => each[8] !== null)) plots.append(plot("Drift of inputs, 0 to 1", [line("drift", 8)], across, { zero: true, most: 1 }));
  if (told.readings.some((each) => each[9] !== null)) plots.append(plot("Accuracy, %", [line("of its answers", 9, 0.01)], across, { zero: true, most: 100, unit: "%" }));
  if (told.readings.some((each) => each[6] !== null)) plots.append(plot("Battery, %", [line("charge", 6, 0.01)], across, { zero: true, most: 100, unit: "%" }));
}

function row(turn) {
  const whole = PARTS.reduce((sum, [name]) => sum + (turn[name] ?? 0), 0);
  const told = PARTS.filter(([name]) => turn[name] > 0).map(([name, part]) => `${part} ${number(turn[name])} s`).join(", ");
  const strip = whole > 0 ? h("span", { class: "strip", role: "img", "aria-label": told, title: `${told}; ${size(turn.down_bytes)} down, ${size(turn.up_bytes)} up` },
    PARTS.filter(([name]) => turn[name] > 0).map(([name, part]) => {
      const piece = h("i", { class: `p-${part}` });
      piece.style.flexGrow = turn[name] / whole;
      return piece;
    })) : turn.code === "asked" && turn.asked ? h("small", {}, since(turn.asked, "asked ", " ago")) : null;
  return h("tr", {},
    h("th", { scope: "row" }, h("a", { href: `/runs/${encodeURIComponent(turn.run)}?round=${turn.round}` }, `${jobOf(turn.run)} ${turn.round}`)),
    h("td", { "data-head": "What", class: "words" }, h("span", { class: `code ${turn.code}` }, turn.text)),
    h("td", { "data-head": "Time", class: strip ? "" : "none" }, strip),
    h("td", { "data-head": "Lasted", class: `number ${whole ? "" : "none"}` }, whole ? `${number(whole)} s` : "–"));
}
