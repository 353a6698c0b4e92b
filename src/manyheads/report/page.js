"use strict";

// Sorting: a click on a header sorts by it, another click turns the order round; what has no value comes last.
for (const button of document.querySelectorAll("#results thead button")) {
  button.addEventListener("click", () => {
    const header = button.parentElement, table = header.closest("table"), column = header.cellIndex;
    const numeric = header.classList.contains("number");
    const before = header.getAttribute("aria-sort");
    const order = before ? (before === "ascending" ? "descending" : "ascending") : (numeric ? "descending" : "ascending");
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    header.setAttribute("aria-sort", order);
    const sign = order === "ascending" ? 1 : -1;
    const value = row => row.cells[column].dataset.order ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const x = value(a), y = value(b);
      if (x === "" || y === "") return (x === "") - (y === "");
      return sign * (numeric ? x - y : x.localeCompare(y, undefined, {numeric: true}));
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  });
}

// Hovering: the nearest point or cell says its value; the arrow keys go from point to point.
const tip = document.getElementById("tip");

function hide(picture) {
  tip.hidden = true;
  picture.querySelector(".spot")?.remove();
}

function show(picture, [x, y, text]) {
  hide(picture);
  const box = picture.getBoundingClientRect(), spot = document.createElement("div");
  spot.className = "spot";
  spot.style.left = 100 * x + "%";
  spot.style.top = 100 * y + "%";
  picture.append(spot);
  tip.textContent = text;
  tip.hidden = false;
  const left = box.left + x * box.width, top = box.top + y * box.height;
  const room = document.documentElement.clientWidth - tip.offsetWidth - 4;
  tip.style.left = scrollX + Math.max(4, Math.min(left - tip.offsetWidth / 2, room)) + "px";
  tip.style.top = scrollY + (top > tip.offsetHeight + 16 ? top - tip.offsetHeight - 12 : top + 14) + "px";
}

function cell({box: [left, top, right, bottom], values}, row, column) {
  const count = values.length;
  if (row < 0 || column < 0 || row >= count || column >= count) return null;
  const x = left + (column + .5) * (right - left) / count, y = top + (row + .5) * (bottom - top) / count;
  return [x, y, `workers ${row} and ${column} · ${values[row][column]}`];
}

function found(hover, picture, event) {
  const box = picture.getBoundingClientRect();
  const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
  if (hover.cells) {
    const {box: [left, top, right, bottom], values} = hover.cells;
    return cell(hover.cells, Math.floor((y - top) / (bottom - top) * values.length), Math.floor((x - left) / (right - left) * values.length));
  }
  const far = ([px, py]) => Math.hypot((px - x) * box.width, (py - y) * box.height);
  const nearest = hover.points.reduce((a, b) => far(b) < far(a) ? b : a);
  return far(nearest) < 40 ? nearest : null;
}

for (const picture of document.querySelectorAll(".picture")) {
  const hover = JSON.parse(picture.dataset.hover);
  if (!hover.cells && !hover.points?.length) continue;
  let place = -1;
  picture.addEventListener("pointermove", event => {
    const point = found(hover, picture, event);
    if (point) show(picture, point); else hide(picture);
  });
  picture.addEventListener("pointerleave", () => hide(picture));
  picture.addEventListener("blur", () => hide(picture));
  picture.addEventListener("keydown", event => {
    const count = hover.cells?.values.length ?? 1, total = hover.points?.length ?? count * count;
    const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: count, ArrowUp: -count}[event.key];
    if (event.key === "Escape") hide(picture);
    if (!step) return;
    event.preventDefault();
    place = Math.max(0, Math.min(total - 1, place + step));
    show(picture, hover.points ? hover.points[place] : cell(hover.cells, Math.floor(place / count), place % count));
  });
}

// What is folded on the screen is printed all the same.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open])")];
  for (const details of folded) details.open = true;
});
addEventListener("afterprint", () => {
  for (const details of folded) details.open = false;
});
