// The radix tree as an indented table. Rows are made anew with each answer, but focus and scroll stay where they were;
// a fold answers at once and its children come with the next answer. All text goes in as text.
function el(tag, className, label) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (label !== undefined) node.textContent = label;
  return node;
}

function head(root, data) {
  const stamp = JSON.stringify(data.columns);
  const row = root.querySelector("thead tr");
  if (row.dataset.stamp === stamp) return;
  row.dataset.stamp = stamp;
  row.replaceChildren(
    ...data.columns.map(([label, unit, help]) => {
      const th = el("th", "", label);
      th.scope = "col";
      th.title = help;
      if (unit) th.append(el("small", "", ` ${unit}`));
      return th;
    }),
  );
}

function first(root, row) {
  const td = el("td");
  td.style.paddingLeft = `${0.3 + 1.05 * (Math.min(row.depth, 14) - 1)}rem`;
  if (row.node === undefined) {
    td.append(el("span", "fold"), el("span", "", row.label));
    if (row.more) {
      const button = el("button", "", root.data.words.more);
      button.type = "button";
      button.onclick = () => root.trigger("top", row.more);
      td.append(button);
    }
    return td;
  }
  const fold = el("button", "fold", row.open ? "▾" : "▸");
  fold.type = "button";
  fold.tabIndex = -1;
  fold.hidden = !row.children;
  fold.ariaLabel = row.open ? root.data.words.close : root.data.words.open;
  fold.onclick = (event) => {
    event.stopPropagation();
    fold.textContent = row.open ? "▸" : "▾";
    root.trigger("fold", row.node);
  };
  const dot = el("i", `dot ${row.state}`);
  dot.style.background = root.data.states[row.state];
  dot.title = row.state;
  td.append(fold, dot, el("span", "", row.label));
  if (row.doubt) {
    const doubt = el("span", "doubt", "?");
    doubt.title = row.doubt;
    td.append(doubt);
  }
  return td;
}

function line(root, row) {
  const tr = el("tr", row.node === undefined ? "more" : "node");
  tr.append(first(root, row));
  if (row.node === undefined) {
    tr.firstChild.colSpan = root.data.columns.length;
    return tr;
  }
  tr.dataset.node = row.node;
  tr.tabIndex = 0;
  tr.ariaLevel = row.depth;
  tr.ariaSelected = String(row.node === root.data.picked);
  if (row.children) tr.ariaExpanded = String(row.open);
  row.cells.forEach((cell, at) => {
    const td = el("td", "", cell);
    if (at === 2) {
      const size = el("span", "size");
      const done = el("i");
      done.style.width = `${Math.round(100 * row.share)}%`;
      size.append(done);
      td.append(size);
    }
    tr.append(td);
  });
  const pick = () => {
    for (const other of root.querySelectorAll("tr[aria-selected]")) other.ariaSelected = "false";
    tr.ariaSelected = "true";
    root.trigger("node", row.node);
  };
  tr.onclick = pick;
  tr.onkeydown = (event) => {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const folds = row.children && ((event.key === "ArrowRight" && !row.open) || (event.key === "ArrowLeft" && row.open));
    if (step) tr[step]?.focus();
    else if (folds) root.trigger("fold", row.node);
    else if (event.key === "Enter" || event.key === " ") pick();
    else return;
    event.preventDefault();
    // The page has keys of its own for these.
    event.stopPropagation();
  };
  return tr;
}

export default function ({ data, parentElement, setTriggerValue }) {
  const root = parentElement.querySelector(".tree");
  root.style.cssText = Object.entries(data.colours).map(([k, v]) => `--${k}:${v}`).join(";");
  root.data = data;
  root.trigger = setTriggerValue;
  head(root, data);
  const scroller = root.querySelector(".scroller");
  scroller.style.maxHeight = `${data.height}px`;
  const body = root.querySelector("tbody");
  const stamp = JSON.stringify([data.rows, data.picked, data.words]);
  if (body.dataset.stamp !== stamp) {
    body.dataset.stamp = stamp;
    const focused = body.getRootNode().activeElement?.closest?.("tr")?.dataset.node;
    const top = scroller.scrollTop;
    body.replaceChildren(...data.rows.map((row) => line(root, row)));
    scroller.scrollTop = top;
    if (focused) body.querySelector(`tr[data-node="${focused}"]`)?.focus({ preventScroll: true });
  }
  scroller.hidden = !data.rows.length;
  const none = root.querySelector(".none");
  none.hidden = data.rows.length > 0;
  none.textContent = data.empty;
}
