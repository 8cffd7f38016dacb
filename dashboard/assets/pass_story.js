// One admission pass: its title, its ledgers as waterfalls, and the queue before and after. All of it is drawn from one
// value in one go, so that a title never stands over the bars of another pass.
function element(name, text, kind) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

const percent = (share) => `${(100 * share).toFixed(2)}%`;

function bar(drawn, colour) {
  const made = document.createElement("i");
  made.style.left = percent(drawn.from);
  made.style.width = percent(Math.max(0, drawn.to - drawn.from));
  if (colour) made.style.background = colour;
  return made;
}

function line(drawn, segments, limitAt) {
  const made = element("div", undefined, `line ${drawn.kind}`);
  made.title = drawn.title;
  const track = element("div", undefined, "track");
  if (drawn.kind === "need") {
    track.append(bar(drawn));
    if (drawn.to > drawn.have) {
      const over = bar({ from: Math.max(drawn.have, drawn.from), to: drawn.to });
      over.className = "over";
      track.append(over);
    }
    const edge = element("span", undefined, "edge");
    edge.style.left = percent(drawn.have);
    track.append(edge);
    if (drawn.cut) track.append(element("span", "▸", "cut"));
  } else {
    track.append(bar(drawn, segments[drawn.kind]));
    const edge = element("span", undefined, "edge");
    edge.style.left = percent(limitAt);
    track.append(edge);
  }
  made.append(element("span", drawn.label, drawn.mono ? "mono" : ""), track, element("b", drawn.amount));
  return made;
}

function panel(ledger, segments) {
  const made = element("figure", undefined, ledger.refused ? "refused" : "");
  made.dataset.ledger = ledger.code;
  const head = element("figcaption");
  const name = element("span");
  name.append(element("b", ledger.name), element("code", ledger.code));
  if (ledger.refused) name.append(element("em", ledger.refused));
  head.append(name, element("span", ledger.limit ?? "", "limit"), element("small", ledger.asks));
  made.append(head);
  if (ledger.limit === null) made.append(element("p", ledger.none, "none"));
  const limitAt = ledger.bars.length ? ledger.bars[0].to : 1;
  made.append(...ledger.bars.map((drawn) => line(drawn, segments, limitAt)));
  return made;
}

function queue(root, told) {
  root.hidden = told.rows.length === 0;
  root.querySelector("h4").textContent = told.title;
  root.querySelector(".rule").textContent = told.rule;
  root.querySelector("thead tr").replaceChildren(...told.heads.map((head) => element("th", head)));
  root.querySelector("tbody").replaceChildren(
    ...told.rows.map((row) => {
      const made = element("tr", undefined, row.way ? "" : "unseen");
      made.dataset.id = row.rid;
      made.title = row.rid;
      const cells = [row.after, row.short, row.key, row.before].map((text) => element("td", text));
      made.append(...cells, element("td", row.moved, row.way));
      return made;
    }),
  );
}

export default function ({ data, parentElement }) {
  const root = parentElement.querySelector(".pass");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  root.dataset.step = data.step;
  root.querySelector("h3").textContent = data.title;
  root.querySelector(".facts").replaceChildren(...data.facts.map((fact) => element("span", fact)));
  const ending = root.querySelector(".ending");
  ending.textContent = data.ending;
  ending.classList.toggle("refused", data.is_refused);
  const why = root.querySelector(".why");
  why.hidden = !data.empty;
  why.textContent = data.empty ?? "";
  const ledgers = root.querySelector(".ledgers");
  ledgers.dataset.step = data.step;
  ledgers.replaceChildren(...data.ledgers.map((ledger) => panel(ledger, data.segments)));
  queue(root.querySelector(".queue"), data.queue);
}
