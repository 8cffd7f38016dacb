// A table that lives: rows are kept by their id and only changed cells are written, so selection, sorting, filter and
// scroll survive every refresh. All text goes in as text, never as HTML: ids of requests come from strangers.
const memory = (window.__admitscopeTables ??= new Map());

function remembered(name) {
  if (!memory.has(name)) memory.set(name, { sort: null, filter: "", scroll: 0 });
  return memory.get(name);
}

const text = (cell) => (Array.isArray(cell) ? cell[0] : cell);
const value = (cell) => (Array.isArray(cell) && cell[1] !== null && cell[1] !== undefined ? cell[1] : text(cell));

function fill(td, column, cell) {
  const stamp = JSON.stringify(cell);
  if (td.dataset.stamp === stamp) return;
  td.dataset.stamp = stamp;
  const [label, , fraction, colour, title] = Array.isArray(cell) ? cell : [cell];
  td.replaceChildren();
  td.title = title ?? (column.kind === "mono" ? label : "");
  if (column.kind === "pill" && label) {
    const dot = document.createElement("i");
    dot.style.background = colour ?? "var(--muted)";
    const word = document.createElement("span");
    word.textContent = label;
    td.append(dot, word);
  } else if (column.kind === "bar") {
    const track = document.createElement("b");
    const done = document.createElement("u");
    done.style.width = `${Math.round(100 * Math.min(1, Math.max(0, fraction ?? 0)))}%`;
    if (colour) done.style.background = colour;
    track.append(done);
    const word = document.createElement("span");
    word.textContent = label;
    td.append(word, track);
  } else {
    td.textContent = label;
    td.style.color = colour ?? "";
  }
}

function head(root, data, state, redraw) {
  const row = root.querySelector("thead tr");
  const stamp = JSON.stringify([data.columns, state.sort]);
  if (row.dataset.stamp === stamp) return;
  row.dataset.stamp = stamp;
  row.replaceChildren(
    ...data.columns.map((column, index) => {
      const th = document.createElement("th");
      th.className = column.kind;
      th.scope = "col";
      th.title = column.help ?? "";
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = column.label;
      if (column.unit) {
        const unit = document.createElement("small");
        unit.textContent = ` ${column.unit}`;
        button.append(unit);
      }
      const isSorted = state.sort?.index === index;
      th.ariaSort = isSorted ? (state.sort.down ? "descending" : "ascending") : "none";
      if (isSorted) button.append(state.sort.down ? " ▾" : " ▴");
      button.onclick = () => {
        // Third click: back to the order of the engine.
        root.isHovered = false;
        if (!isSorted) state.sort = { index, down: column.kind !== "mono" && column.kind !== "text" };
        else state.sort = state.sort.turned ? null : { index, down: !state.sort.down, turned: true };
        redraw();
      };
      th.append(button);
      return th;
    }),
  );
}

function order(rows, state) {
  if (!state.sort) return rows;
  const { index, down } = state.sort;
  const collator = new Intl.Collator(undefined, { numeric: true });
  const sorted = [...rows].sort((a, b) => {
    const x = value(a.cells[index]);
    const y = value(b.cells[index]);
    return typeof x === "number" && typeof y === "number" ? x - y : collator.compare(String(x), String(y));
  });
  return down ? sorted.reverse() : sorted;
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".table");
  const state = remembered(data.name);
  const body = root.querySelector("tbody");
  const scroller = root.querySelector(".scroller");
  const filter = root.querySelector("input");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  root.lastData = data;
  root.trigger = setTriggerValue;

  function draw() {
    const now = root.lastData;
    head(root, now, state, draw);
    if (now.hold && root.isHovered && root.known?.size) {
      // Rows that flow by cannot be hit: under the pointer they stand still.
      for (const [id, tr] of root.known) tr.ariaSelected = String(id === now.selected);
      root.querySelector(".note").textContent = now.held;
      return;
    }
    const needle = state.filter.trim().toLowerCase();
    const found = needle
      ? now.rows.filter((row) => row.cells.some((cell) => String(text(cell)).toLowerCase().includes(needle)))
      : now.rows;
    const known = (root.known ??= new Map());
    const wanted = order(found, state);
    const ids = new Set(wanted.map((row) => row.id));
    for (const [id, tr] of known) {
      if (!ids.has(id)) {
        tr.remove();
        known.delete(id);
      }
    }
    wanted.forEach((row, index) => {
      let tr = known.get(row.id);
      if (!tr) {
        tr = document.createElement("tr");
        tr.append(
          ...now.columns.map((column) => {
            const td = document.createElement("td");
            td.className = column.kind;
            return td;
          }),
        );
        known.set(row.id, tr);
        if (now.pickable) {
          tr.tabIndex = 0;
          const pick = () => {
            for (const other of known.values()) other.ariaSelected = "false";
            tr.ariaSelected = "true";
            root.trigger("picked", row.id);
          };
          tr.onclick = pick;
          tr.onkeydown = (event) => {
            if (event.key === "Enter" || event.key === " ") {
              event.preventDefault();
              pick();
            }
          };
        }
      }
      tr.dataset.id = row.id;
      tr.ariaSelected = String(row.id === now.selected);
      tr.classList.toggle("quiet", Boolean(row.quiet));
      now.columns.forEach((column, at) => fill(tr.children[at], column, row.cells[at]));
      if (body.children[index] !== tr) body.insertBefore(tr, body.children[index] ?? null);
    });
    root.querySelector(".note").textContent = needle
      ? now.match.replace("{found}", found.length).replace("{all}", now.rows.length)
      : now.note;
    root.querySelector(".empty").hidden = now.rows.length > 0;
    root.querySelector(".empty strong").textContent = now.empty[0];
    root.querySelector(".empty span").textContent = now.empty[1];
    root.querySelector("table").hidden = now.rows.length === 0;
  }

  root.classList.toggle("pickable", Boolean(data.pickable));
  if (data.pickable) root.querySelector("table").setAttribute("role", "grid");
  scroller.style.maxHeight = `${data.height}px`;
  filter.hidden = !data.filter;
  filter.placeholder = data.filter ?? "";
  filter.ariaLabel = data.filter ?? "Filter";
  if (filter.value !== state.filter && document.activeElement !== filter) filter.value = state.filter;
  filter.oninput = () => {
    state.filter = filter.value;
    draw();
  };
  filter.onkeydown = (event) => {
    const typed = filter.value.trim();
    if (event.key !== "Enter" || !typed || !root.lastData.pickable) return;
    // One match is meant; else the text itself, which may be the id of a request that the list no longer has.
    const ids = [...body.children].map((tr) => tr.dataset.id);
    root.trigger("picked", ids.length === 1 ? ids[0] : typed);
  };
  scroller.onscroll = () => {
    state.scroll = scroller.scrollTop;
  };
  scroller.onpointerenter = (event) => {
    root.isHovered = event.pointerType === "mouse";
  };
  scroller.onpointerleave = () => {
    root.isHovered = false;
    draw();
  };
  const isFirst = !root.known;
  draw();
  if (isFirst && state.scroll) scroller.scrollTop = state.scroll;
}
