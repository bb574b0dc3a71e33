// On the page of options: a field above the tables; only rows that hold all its words stay. #q=words fills it.
(function () {
  "use strict";
  if (!/\/options\.html$/.test(location.pathname)) return;
  var first = document.querySelector("article table");
  if (!first) return;
  var field = document.createElement("input");
  field.type = "search";
  field.className = "options-search";
  field.placeholder = "Options with these words, e.g. recorded dump";
  field.setAttribute("aria-label", field.placeholder);
  var rows = Array.prototype.slice.call(document.querySelectorAll("article tbody tr"));
  function show() {
    var words = field.value.toLowerCase().split(/\s+/).filter(Boolean);
    rows.forEach(function (row) {
      var text = row.textContent.toLowerCase();
      row.hidden = !words.every(function (word) { return text.indexOf(word) >= 0; });
    });
  }
  field.addEventListener("input", show);
  var heading = document.querySelector("article h2");
  heading.parentNode.insertBefore(field, heading);
  field.value = decodeURIComponent((/^#q=(.*)/.exec(location.hash) || ["", ""])[1]);
  show();
})();
