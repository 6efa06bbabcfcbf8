// Search from a disk: browsers start no worker for file:// pages, so a hidden frame runs its script instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    #waiting = []
    #window = null

    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = (data) => this.#tell(this, new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = new URL(url, location.href)
      script.onload = () => {
        this.#window = inside
        this.#waiting.splice(0).forEach((data) => this.postMessage(data))
      }
      inside.document.head.append(script)
    }

    postMessage(data) {
      if (this.#window) this.#tell(this.#window, new this.#window.MessageEvent("message", { data }))
      else this.#waiting.push(data)
    }

    terminate() {}

    #tell(target, event) {
      setTimeout(() => {
        target.dispatchEvent(event)
        target["onmessage"]?.(event)
      })
    }
  }
}
