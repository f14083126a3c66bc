const size = text => parseFloat(text.replaceAll(",", ""));
const box = document.createElement("input");
box.type = "search";
box.style = "width: 100%; max-width: 24rem; font: inherit; padding: .3rem .5rem";
box.placeholder = box.ariaLabel = "filter rows by words, such as focused";
document.querySelector("h1").after(box);
const filter = () => {
  const words = box.value.toLowerCase().split(/\s+/);
  for (const row of document.querySelectorAll("tbody tr"))
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
};
box.addEventListener("input", filter);
for (const head of document.querySelectorAll("th")) {
  const words = head.matches(".text-left");
  const column = head.cellIndex, body = head.closest("table").tBodies[0];
  const sort = () => {
    const up = head.ariaSort === "descending" || (head.ariaSort !== "ascending" && words);
    for (const other of head.parentNode.cells) other.ariaSort = "none";
    head.ariaSort = up ? "ascending" : "descending";
    const cell = row => row.cells[column].textContent;
    const compare = (a, b) => words ? a.localeCompare(b) : size(a) - size(b);
    const missing = row => !words && isNaN(size(cell(row)));
    const order = (a, b) => missing(a) - missing(b) || (up ? 1 : -1) * compare(cell(a), cell(b)) || 0;
    body.append(...[...body.rows].sort(order));
  };
  const button = document.createElement("button");
  button.append(...head.childNodes);
  button.style = "all: unset; cursor: pointer; outline: revert";
  button.addEventListener("click", sort);
  head.append(button);
}
box.value = decodeURIComponent(location.hash.slice(1));
filter();
