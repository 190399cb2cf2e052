{{- define "reprise.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Short enough that "-tokenizer" still fits a Service's 63 characters. */}}
{{- define "reprise.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "reprise.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "reprise.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Arguments of the next three: root, service. */}}
{{- define "reprise.selector" -}}
app.kubernetes.io/name: {{ include "reprise.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .service }}
{{- end }}

{{- define "reprise.labels" -}}
{{ include "reprise.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "reprise.image" -}}
{{- $image := .root.Values.image -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
reprise-{{ .service }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "reprise.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* A number of values.yaml is a float here, and 1073741824 must not become 1.073741824e+09. */}}
{{- define "reprise.settingValue" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{- define "reprise.podPlacement" -}}
{{- with .nodeSelector -}}
nodeSelector: {{- toYaml . | nindent 2 }}
{{ end }}
{{- with .tolerations -}}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
