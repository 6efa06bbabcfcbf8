{{- define "tiercel.name" -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}-tiercel
{{- end }}

{{- define "tiercel.selector" -}}
app.kubernetes.io/name: tiercel
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "tiercel.labels" -}}
{{ include "tiercel.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "tiercel.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* What tiers of kind memory may take, in MiB. */ -}}
{{- define "tiercel.inMemory" -}}
{{- $units := dict "B" 1 "kB" 1e3 "KB" 1e3 "MB" 1e6 "GB" 1e9 "TB" 1e12 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- $mib := 0 -}}
{{- range .Values.tiers -}}
{{- if and (eq (.kind | default "files") "memory") .size -}}
{{- $number := regexFind "^[0-9.]+" .size | float64 -}}
{{- $unit := get $units (regexFind "[A-Za-z]+$" .size) | float64 -}}
{{- $mib = divf (mulf $number $unit) 1048576 | ceil | int64 | add $mib -}}
{{- end -}}
{{- end -}}
{{ $mib }}
{{- end }}

{{- /* The arena's memory is the daemon's, who touches it first, wherever it is mapped later. */ -}}
{{- define "tiercel.memory" -}}
{{ add (mul .Values.ram.sizeGiB 1024) (include "tiercel.inMemory" . | int64) .Values.ram.overheadMiB }}Mi
{{- end }}

{{- define "tiercel.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "tiercel.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user.uid }}
runAsGroup: {{ .Values.user.gid }}
fsGroup: {{ .Values.user.gid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "tiercel.daemon" -}}
name: tiercel
image: {{ include "tiercel.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
args:
  - daemon
  - --config=/etc/tiercel/tiercel.toml
  {{- if .Values.http.enabled }}
  - --http=0.0.0.0:{{ .Values.http.port }}
  {{- end }}
  - --log-format=json
env:
  - {name: TIERCEL_CACHE_DIR, value: /tmp/tiercel}
  {{- if and .Values.http.enabled .Values.http.keySecret }}
  - name: TIERCEL_API_KEY
    valueFrom: {secretKeyRef: {name: {{ .Values.http.keySecret }}, key: key}}
  {{- end }}
  {{- with .Values.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
securityContext:
  {{- include "tiercel.locked" . | nindent 2 }}
resources:
  requests: {cpu: {{ .Values.cpu | quote }}, memory: {{ include "tiercel.memory" . }}}
  limits: {memory: {{ include "tiercel.memory" . }}}
{{- if .Values.http.enabled }}
ports:
  - {name: metrics, containerPort: {{ .Values.http.port }}}
{{- end }}
# Taking and touching the memory comes first, and disks are listed.
startupProbe:
  exec: {command: [tiercel, daemon, --socket, /run/tiercel/s, status]}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 60
livenessProbe:
  exec: {command: [tiercel, daemon, --socket, /run/tiercel/s, status]}
  periodSeconds: 60
  timeoutSeconds: 20
  failureThreshold: 3
{{- if .Values.http.enabled }}
readinessProbe:
  {{- if .Values.http.keySecret }}
  tcpSocket: {port: metrics}
  {{- else }}
  httpGet: {path: /metrics, port: metrics}
  {{- end }}
  periodSeconds: 15
  timeoutSeconds: 5
{{- end }}
volumeMounts:
  - {name: socket, mountPath: /run/tiercel}
  - {name: config, mountPath: /etc/tiercel, readOnly: true}
  - {name: disk, mountPath: /var/lib/tiercel}
  - {name: scratch, mountPath: /tmp}
{{- end }}

{{- define "tiercel.volumes" -}}
- name: config
  configMap: {name: {{ include "tiercel.name" . }}}
- name: disk
  {{- range $kind, $where := .Values.disk | default (dict "emptyDir" dict) }}
  {{ $kind }}: {{ $where | toJson }}
  {{- end }}
- name: scratch
  emptyDir: {sizeLimit: 256Mi}
{{- end }}
