// What changed on the daemon's disk is told by the server; htmx then fetches the page's main part.
"use strict";
(() => {
  const said = document.getElementById("live");
  let stream = null;

  const say = (text) => {
    // A reader of the screen reads each change, so only changes are made.
    if (said.textContent !== text) said.textContent = text;
  };

  const listen = () => {
    stream = new EventSource(document.body.dataset.events);
    stream.addEventListener("changed", () => {
      say("Live: this page follows the daemon.");
      htmx.trigger(document.body, "refresh");
    });
    stream.addEventListener("error", () => {
      say("Not live: the console does not answer. Is it still running?");
    });
  };

  // A page that nobody sees costs the server nothing.
  const look = () => {
    if (document.hidden && stream) {
      stream.close();
      stream = null;
    } else if (!document.hidden && !stream) {
      listen();
    }
  };

  document.addEventListener("visibilitychange", look);
  look();
})();
